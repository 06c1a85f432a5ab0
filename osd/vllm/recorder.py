"""Records of the decoding steps of a vLLM worker, from the tensors of its model runner.

The hooks of both model runners call this module within vLLM's steps. It computes on whole steps, without Python code
per row, and its errors never reach vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from osd.capture.trace import GROUP
from osd.runtime.device import to_device
from osd.runtime.top import Top, most_probable
from osd.vllm.admission import Admissions
from osd.vllm.steps import CapturedRequest, StepRecord, shared

log = logging.getLogger("vllm.osd")

MAX_ERRORS = 10
"""Number of consecutive steps with an error after which capture switches itself off."""

_BLOCK = 128  # rows whose most probable tokens a GPU selects at a time, because each row takes several vocabularies
_UNLIMITED = np.iinfo(np.int64).max

Indices = NDArray[np.int64]


def spans(starts: Indices, lengths: Indices) -> Indices:
    """Return the concatenation of the ranges from ``starts`` with ``lengths``."""
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + np.repeat(starts - ends + lengths, lengths)


def before(lengths: Indices) -> Indices:
    """Return the sum of the lengths before each length."""
    return lengths.cumsum() - lengths


def top_of(logits: Tensor, rows: Indices, k: int) -> Top:
    """Return the most probable tokens of the given rows of logits as int32 and half precision."""
    if logits.dtype != torch.float32 or logits.device.type != "cpu":
        blocks = [_reference(logits, rows[start : start + _BLOCK], k) for start in range(0, len(rows), _BLOCK)]
        top = Top.joined(blocks)
    else:
        top = most_probable(logits.contiguous(), rows, k)
    return Top(top.ids.int(), top.logp.half(), top.tail.half())


def _reference(logits: Tensor, rows: Indices, k: int) -> Top:
    chosen = logits[to_device(rows, logits.device)].float()  # half precision would round log-probabilities
    return most_probable(chosen, range(len(rows)), k)


def joined(layers: Sequence[Tensor], rows: Indices) -> Tensor:
    """Return the states of the given rows, those of all layers next to each other, in bfloat16 [n, width]."""
    index = to_device(rows, layers[0].device)
    return torch.cat([layer[index] for layer in layers], -1).to(torch.bfloat16)


def rounded(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return states [n, width] in 8 bits and their scales [n, groups], as ``Trace.with_rounded_states`` rounds them."""
    rows, width = states.shape
    groups = torch.nn.functional.pad(states.float(), (0, -width % GROUP)).view(rows, -1, GROUP)
    scale = (groups.abs().amax(2) / 127).half()
    # The next larger number in half precision has the next integer as its bits.
    scale = torch.where(scale.isinf(), scale, (scale.view(torch.int16) + 1).view(torch.float16))
    integers = (groups / scale.float().unsqueeze(2)).round().to(torch.int8)
    return integers.view(rows, -1)[:, :width], scale


@dataclass(frozen=True)
class CapturePlan:
    """Places of the captured requests in a decoding step, known before it ends.

    n is the number of captured requests with rows in the step.

    Attributes:
        version: the version of the drafter that drafted.
        begun: requests whose capture begins.
        ended: keys of requests that ended.
        keys: the keys of the n requests.
        places: [n] their places in the batch.
        read: [n] tokens that the target reads.
        drafts: [n] draft tokens among them.
        testable: [n] first draft tokens that verification may accept; a grammar excludes the others.
        has_states: [n] whether the states of the request are captured.
        logit_rows: rows of the logits of all n requests, ``drafts + 1`` each.
        state_rows: rows of the tokens of requests with states, ``read`` each.
    """

    version: int
    begun: list[CapturedRequest]
    ended: list[str]
    keys: list[str]
    places: Indices
    read: Indices
    drafts: Indices
    testable: Indices
    has_states: NDArray[np.bool_]
    logit_rows: Indices
    state_rows: Indices

    def record(self, result: StepResult) -> StepRecord:
        """Return the record of the step with the rows of committed tokens.

        Raises:
            ValueError: a state is too large for 8 bits.
        """
        sampled = result.sampled
        committed = np.where(sampled > 0, self.read - self.drafts + sampled - 1, self.read)
        rows = spans(before(self.drafts + 1), sampled)
        tested = np.full(int((self.drafts + 1).sum()), -1, np.int32)
        tested[spans(before(self.drafts + 1), self.testable)] = result.drafted[
            spans(before(self.drafts), self.testable)
        ]
        state_rows = np.where(self.has_states, committed, 0)
        states = scale = None
        if result.states is not None and state_rows.any():
            kept = spans(before(self.read[self.has_states]), committed[self.has_states])
            states = shared(result.states[kept], "bfloat16" if result.scale is None else None)
            if result.scale is not None:
                if np.isinf(chosen := result.scale[kept]).any():
                    raise ValueError("a hidden state is too large for 8 bits: set OSD_CAPTURE__STATES=full")
                scale = shared(chosen)
        elif result.states is None:
            state_rows = np.zeros_like(state_rows)
        return StepRecord(
            version=self.version,
            begun=self.begun,
            ended=self.ended,
            keys=self.keys,
            starts=_int32(result.starts),
            state_rows=_int32(state_rows),
            sampled=_int32(sampled),
            tokens=_int32(result.tokens),
            drafted=shared(tested[rows]),
            accepted=_int32(np.maximum(sampled - 1, 0)),
            target_ids=shared(result.target_ids[rows]),
            target_logp=shared(result.target_logp[rows]),
            target_tail=shared(result.target_tail[rows]),
            states=states,
            states_scale=scale,
        )


@dataclass(frozen=True)
class StepResult:
    """Results of a step on the host, for the n requests of its plan.

    Attributes:
        starts: [n] position of the first token that the target read.
        sampled: [n] number of new tokens.
        tokens: new tokens of all n requests.
        drafted: draft tokens of all n requests, ``drafts`` each.
        target_ids: [L, K] most probable tokens at the rows ``logit_rows`` of the plan.
        target_logp: [L, K] their log-probabilities.
        target_tail: [L] logarithm of the probability of all other tokens.
        states: [T, width] states at the rows ``state_rows`` of the plan, as bits of bfloat16 or in 8 bits.
        scale: [T, groups] scales of states in 8 bits.
    """

    starts: NDArray[Any]
    sampled: Indices
    tokens: NDArray[Any]
    drafted: NDArray[Any]
    target_ids: NDArray[Any]
    target_logp: NDArray[Any]
    target_tail: NDArray[Any]
    states: NDArray[Any] | None = None
    scale: NDArray[Any] | None = None


def _int32(values: NDArray[Any]) -> Any:
    return shared(values.astype(np.int32))


class Guard:
    """Context that keeps errors away from vLLM and counts them.

    Attributes:
        errors: the number of errors.
        is_off: whether ``MAX_ERRORS`` steps in a row had an error.
    """

    def __init__(self) -> None:
        self.errors = self._consecutive = 0
        self.is_off = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        """Count an error and suppress it, unless it ends the process."""
        if not isinstance(error, Exception):
            return False
        self.errors += 1
        self._consecutive += 1
        log.debug("the capture of a step failed", exc_info=error)
        if self._consecutive >= MAX_ERRORS and not self.is_off:
            self.is_off = True
            log.error(
                "capture is off until the next start, because %d steps in a row failed; the last error: %s: %s",
                self._consecutive,
                type(error).__name__,
                " ".join(str(error).split()),
            )
        return True

    def succeeded(self) -> None:
        """Begin to count consecutive errors from 0."""
        self._consecutive = 0


@dataclass
class Recorder:
    """Records of the steps of one worker.

    ``schedule`` and ``plan`` are for the thread of vLLM's steps; ``finish`` may run on another thread.

    Attributes:
        admissions: chooses the requests.
        k: the number of log-probabilities of a token.
        int8: whether states are rounded to 8 bits.
        version: the version of the loaded drafter.
        put: writes a record without blocking, for every thread, as vLLM reads results on a thread of its own.
        guard: keeps errors away from vLLM.
    """

    admissions: Admissions
    k: int
    int8: bool
    version: int
    put: Callable[[StepRecord], object]
    guard: Guard = field(default_factory=Guard)

    def __post_init__(self) -> None:
        """Begin without requests."""
        self._drafted_by = self.version
        self._known: dict[str, bool | None] = {}  # by key: whether states are captured; None without capture
        self._begun: list[CapturedRequest] = []
        self._ended: list[str] = []

    def schedule(self, output: Any) -> None:
        """Read the requests that end and begin with a step of vLLM's scheduler (``SchedulerOutput``)."""
        self._ended += [key for key in output.finished_req_ids if self._known.pop(key, None) is not None]
        for request in output.scheduled_new_reqs:
            if request.req_id in self._known:  # it was preempted
                continue
            admission = self.admissions.admit(request)
            self._known[request.req_id] = None if admission is None else admission.states_weight > 0
            if admission is not None:
                self._begun.append(admission)
        if not output.total_num_scheduled_tokens:
            self._write_ended()

    def plan(
        self,
        keys: Sequence[str],
        read: Iterable[int],
        drafts: Iterable[int] | None,
        acceptable: dict[str, int] | None = None,
    ) -> CapturePlan | None:
        """Return the plan of a step, or None if nothing is captured in it.

        Args:
            keys: the keys of all requests of the step, in order.
            read: the number of tokens of each request.
            drafts: the number of draft tokens of each request; None for none.
            acceptable: the number of first draft tokens that verification may accept, by key; all without an entry.
        """
        version, self._drafted_by = self._drafted_by, self.version
        known = self._known
        chosen = [(place, states) for place, key in enumerate(keys) if (states := known.get(key)) is not None]
        if not chosen:
            self._write_ended()
            return None
        all_read = np.fromiter(read, np.int64, len(keys))
        all_drafts = np.zeros(len(keys), np.int64) if drafts is None else np.fromiter(drafts, np.int64, len(keys))
        places = np.array([place for place, _ in chosen], np.int64)
        has_states = np.array([states for _, states in chosen], np.bool_)
        begun, self._begun = self._begun, []
        ended, self._ended = self._ended, []
        chosen_keys = [keys[place] for place, _ in chosen]
        taken, drafted = all_read[places], all_drafts[places]
        testable = drafted
        if acceptable:
            limits = np.array([acceptable.get(key, _UNLIMITED) for key in chosen_keys], np.int64)
            testable = np.minimum(drafted, limits)
        return CapturePlan(
            version=version,
            begun=begun,
            ended=ended,
            keys=chosen_keys,
            places=places,
            read=taken,
            drafts=drafted,
            testable=testable,
            has_states=has_states,
            logit_rows=spans(before(all_drafts + 1)[places], drafted + 1),
            state_rows=spans(before(all_read)[places][has_states], taken[has_states]),
        )

    def finish(self, plan: CapturePlan, result: StepResult) -> None:
        """Write the record of a step."""
        self.put(plan.record(result))
        self.admissions.note(len(result.tokens))
        self.guard.succeeded()

    def states(self, layers: Sequence[Tensor] | None, plan: CapturePlan) -> list[Tensor]:
        """Return the states of a plan and their scales as new tensors on their device; empty without states."""
        if not layers or not len(plan.state_rows):
            return []
        states = joined(layers, plan.state_rows)
        return [*rounded(states)] if self.int8 else [states.view(torch.int16)]

    def _write_ended(self) -> None:
        """Write a record of the requests that ended, without rows."""
        if not self._ended:
            return
        none = np.zeros(0, np.int64)
        plan = CapturePlan(self.version, [], self._ended, [], none, none, none, none, none.astype(np.bool_), none, none)
        self._ended = []
        ids, half = np.zeros((0, self.k), np.int32), np.zeros(0, np.float16)
        result = StepResult(none, none, none, none, ids, ids.astype(np.float16), half)
        self.put(plan.record(result))
