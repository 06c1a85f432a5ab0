"""Assembly of traces from the step records of vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, Trace
from osd.vllm.steps import CapturedRequest, StepRecord

OPEN_REQUESTS = 4096
"""Limit on the requests whose traces are being built."""

OPEN_BYTES = 1 << 30
"""Limit on the bytes of open requests: 156 segments of 512 tokens with 12.9 KB each."""

SILENT_SECONDS = 60.0
"""Time without rows after which a request ends; vLLM reports an end only with its next step."""


class TraceOrigin(msgspec.Struct, frozen=True):
    """Common fields of the traces of a worker.

    Attributes:
        target: the label of the target.
        drafter_domain: the domain of the drafter.
        source: the name of the drafter as a source of draft tokens.
    """

    target: str
    drafter_domain: str
    source: str


class TraceAssembly:
    """Builder of the traces of all captured requests, for use by one thread.

    A request ends early at a gap in its positions, when its trace would exceed the limits, or after a minute without
    rows; the tokens until then become a trace, and later rows are ignored. Traces are built as
    ``osd.engine.trace_builder`` builds them.
    """

    def __init__(
        self,
        origin: TraceOrigin,
        segment: int,
        count: Callable[[str], object],
        is_purged: Callable[[str], bool] = lambda request_id: False,
        *,
        max_requests: int = OPEN_REQUESTS,
        max_bytes: int = OPEN_BYTES,
    ) -> None:
        """Begin without requests.

        Args:
            origin: common fields of all traces.
            segment: limit on the completion tokens of a trace.
            count: called with the name of each event: ``closed`` (a request), ``traces``, ``empty`` (a request that
                ended early without a trace), ``gaps``, ``limited``, ``expired`` or ``purged``.
            is_purged: returns whether a request id was purged, so that its capture does not begin.
            max_requests: limit on open requests.
            max_bytes: limit on the bytes of open requests.
        """
        self._origin, self._segment, self._count, self._is_purged = origin, segment, count, is_purged
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._open: dict[str, _Request] = {}
        self._bytes = 0
        self._forms: dict[str, tuple[str, int]] = {}

    def add(self, record: StepRecord, now: float) -> list[Trace]:
        """Add the results of a step and return the finished traces.

        Args:
            record: the checked record of the step.
            now: the time in seconds, of the same clock as for ``expire``.
        """
        traces = self._adopt_forms(record)
        for admission in record.begun:
            traces += self._begin(admission, record.version, now)
        new, states = _new_tokens(record), None if record.states is None else record.states.numpy()
        scale = None if record.states_scale is None else record.states_scale.numpy()
        token_end = state_end = 0
        rows = (record.starts.numpy().tolist(), record.state_rows.numpy().tolist(), record.sampled.numpy().tolist())
        for key, start, state_rows, sampled in zip(record.keys, *rows, strict=True):
            token_at, token_end = token_end, token_end + sampled
            state_at, state_end = state_end, state_end + state_rows
            request = self._open.get(key)
            if request is None:
                continue
            if request.version != record.version:
                traces += self._build(request, least=1)
                request.version = record.version
            if request.is_complete:
                continue
            request.touched, before = now, request.nbytes
            is_next = request.take(
                start,
                new[token_at:token_end],
                None if states is None else states[state_at:state_end],
                None if scale is None else scale[state_at:state_end],
            )
            self._bytes += request.nbytes - before
            if not is_next:
                traces += self._end_early(key, "gaps")
                continue
            traces += self._build(request, least=self._segment)
            if self._bytes > self._max_bytes and key in self._open:
                traces += self._end_early(key, "limited")
        for key in record.ended:
            traces += self._end(key)
        return traces

    def end_all(self) -> list[Trace]:
        """End all requests, because records are lost or no more will follow; return their traces."""
        return [trace for key in list(self._open) for trace in self._cut(key)]

    def expire(self, now: float) -> list[Trace]:
        """End the requests without rows for ``SILENT_SECONDS``, and return their traces."""
        silent = [key for key, request in self._open.items() if now - request.touched >= SILENT_SECONDS]
        traces: list[Trace] = []
        for key in silent:  # a client that left before the first token loses nothing, so this is not ``_cut``
            self._count("expired")
            traces += self._end(key)
        return traces

    def purge(self, is_purged: Callable[[str], bool]) -> int:
        """Drop the open requests whose id ``is_purged`` accepts, and return their number."""
        purged = [key for key, request in self._open.items() if is_purged(request.admission.request_id)]
        for key in purged:
            self._close(key)
            self._count("purged")
        return len(purged)

    def _adopt_forms(self, record: StepRecord) -> list[Trace]:
        """End all requests when the number of log-probabilities or the form of the states changes."""
        traces: list[Trace] = []
        for name in ("target_ids", "states"):
            array: Array | None = getattr(record, name)
            if array is None or not array.shape[0]:
                continue
            form = (array.dtype, array.shape[1])
            if self._forms.setdefault(name, form) != form:
                traces += [trace for key in list(self._open) for trace in self._end_early(key, "gaps")]
                self._forms[name] = form
        return traces

    def _begin(self, admission: CapturedRequest, version: int, now: float) -> list[Trace]:
        traces = self._end(admission.key)
        request = _Request(admission, self._origin, self._segment, version, now)
        self._open[admission.key] = request
        self._bytes += request.nbytes
        if self._is_purged(admission.request_id):
            self._close(admission.key)
            self._count("purged")
        elif len(self._open) > self._max_requests:
            traces += self._end_early(admission.key, "limited")
        return traces

    def _build(self, request: _Request, least: int) -> list[Trace]:
        """Return traces while the request has ``least`` new tokens; close a request whose answer is complete."""
        traces: list[Trace] = []
        before = request.nbytes
        while request.pending >= least and not request.is_complete:
            traces.append(request.build())
            self._count("traces")
        self._bytes += request.nbytes - before
        if request.is_complete:
            self._close(request.admission.key)
        return traces

    def _end(self, key: str) -> list[Trace]:
        request = self._open.get(key)
        if request is None:
            return []
        traces = self._build(request, least=1)
        if not request.is_complete:
            self._close(key)
        return traces

    def _end_early(self, key: str, reason: str) -> list[Trace]:
        self._count(reason)
        return self._cut(key)

    def _cut(self, key: str) -> list[Trace]:
        """End an open request before its last token; count it if no trace has any of its tokens."""
        request = self._open[key]
        traces = self._end(key)
        if request.is_empty:
            self._count("empty")
        return traces

    def _close(self, key: str) -> None:
        self._bytes -= self._open.pop(key).nbytes
        self._count("closed")


def _new_tokens(record: StepRecord) -> NDArray[Any]:
    """Return the new tokens of a step as records [S] with verdict and distribution of the target."""
    sampled, drafted = record.sampled.numpy(), record.drafted.numpy()
    tokens = np.empty(
        len(drafted),
        [
            ("token", np.int32),
            ("drafted", np.int32),
            ("verdict", np.int8),
            ("ids", np.int32, record.target_ids.shape[1:]),
            ("logp", np.float16, record.target_ids.shape[1:]),
            ("tail", np.float16),
        ],
    )
    index = np.arange(len(drafted)) - np.repeat(np.cumsum(sampled) - sampled, sampled)
    verdict = np.where(index < np.repeat(record.accepted.numpy(), sampled), ACCEPTED, REJECTED)
    tokens["token"], tokens["drafted"] = record.tokens.numpy(), drafted
    tokens["verdict"] = np.where(drafted < 0, NOT_DRAFTED, verdict)
    tokens["ids"], tokens["logp"] = record.target_ids.numpy(), record.target_logp.numpy()
    tokens["tail"] = record.target_tail.numpy()
    return tokens


@dataclass
class _Request:
    """Open request.

    Attributes:
        version: version of the drafter in the open segment.
        touched: time of the last rows.
        pending: number of tokens in the open segment.
        is_complete: whether a built segment has the end of the answer.
        nbytes: bytes of all arrays.
    """

    admission: CapturedRequest
    origin: TraceOrigin
    segment: int
    version: int
    touched: float
    pending: int = 0
    is_complete: bool = False
    nbytes: int = 0
    _number: int = 0  # of the open segment
    _built: int = 0  # tokens in earlier segments
    _tokens: list[NDArray[Any]] = field(default_factory=list)
    _states: list[NDArray[Any]] = field(default_factory=list)
    _scales: list[NDArray[Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether no segment was built."""
        return not self._number

    def __post_init__(self) -> None:
        """Begin the context with the prompt, without the tokens that have no states."""
        prompt = self.admission.prompt_ids.numpy()
        self._cursor = self.admission.computed  # position of the next state
        self._length = len(prompt)  # known tokens
        self._context = prompt[self._cursor :] if self.admission.states_weight else prompt
        self.nbytes = self._context.nbytes

    def take(
        self,
        start: int,
        new: NDArray[Any],
        states: NDArray[Any] | None,
        scale: NDArray[Any] | None,
    ) -> bool:
        """Add the results of a step, without positions that are known already.

        Returns:
            False at a gap: positions are missing before ``start`` or before the new tokens, or the new tokens differ
            from tokens at the same positions.
        """
        if not self.admission.states_weight:
            states = scale = None
            # A single token may follow positions that are computed again, and drafted tokens follow the last one.
            read = max(self._length - start, 1) if len(new) == 1 else len(new)
            expected = self._length - 1
        else:
            read, expected = 0 if states is None else len(states), self._cursor
        end = start + read  # position of the last new token
        known = self._length - (end - len(new) + 1)  # new tokens that are known already
        if start > expected or known < 0:
            return False
        if len(new) and known and not self._is_repeated(new["token"], known):
            return False
        if states is not None and end > self._cursor:
            self._append(self._states, states[self._cursor - start :])
            if scale is not None:
                self._append(self._scales, scale[self._cursor - start :])
        self._cursor = max(self._cursor, end)
        if known < len(new):
            self._append(self._tokens, new[known:])
            self.pending += len(new) - known
            self._length += len(new) - known
        return True

    def build(self) -> Trace:
        """Return the next segment and begin another one, whose context are the last tokens until then."""
        admission, origin = self.admission, self.origin
        rows, context = np.concatenate(self._tokens), self._context
        rows = rows[: min(self.segment, admission.max_tokens - self._built)]
        stops = np.flatnonzero(np.isin(rows["token"], admission.stop_ids))
        if len(stops):
            rows = rows[: stops[0] + 1]
        length = len(rows)
        self.is_complete = bool(len(stops)) or self._built + length >= admission.max_tokens
        states, scale = (np.concatenate(parts) if parts else None for parts in (self._states, self._scales))
        needed = len(context) + length - 1
        is_drafted = rows["verdict"] != NOT_DRAFTED
        trace = Trace(
            request_id=admission.request_id,
            segment=self._number,
            domain=admission.domain,
            target=origin.target,
            drafter_domain=origin.drafter_domain,
            drafter_version=self.version,
            created=time.time(),
            temperature=admission.temperature,
            top_k=admission.top_k,
            top_p=admission.top_p,
            prompt_ids=Array.of(context),
            completion_ids=Array.of(rows["token"]),
            target_ids=Array.of(rows["ids"]),
            target_logp=Array.of(rows["logp"]),
            target_tail=Array.of(rows["tail"]),
            draft_ids=Array.of(np.empty((length, 0), np.int32)),
            draft_logp=Array.of(np.empty((length, 0), np.float16)),
            draft_tail=Array.of(np.zeros(length, np.float16)),
            drafted=Array.of(rows["drafted"]),
            verdict=Array.of(rows["verdict"]),
            sources=(origin.source,) if is_drafted.any() else (),
            source=Array.of(is_drafted.astype(np.int8) - np.int8(1)),
            hidden=None if states is None else Array.of(states[:needed], "bfloat16" if scale is None else None),
            hidden_scale=None if scale is None else Array.of(scale[:needed]),
            completes=admission.completes and not self._number,
            weight=admission.weight,
            states_weight=admission.states_weight,
        )
        self._begin_next(rows, states, scale)
        return trace

    def _begin_next(self, built: NDArray[Any], states: NDArray[Any] | None, scale: NDArray[Any] | None) -> None:
        length = len(built)
        context = np.concatenate([self._context, built["token"]])
        self._context = context[-self.segment :].copy()
        passed = len(context) - len(self._context)
        rest = np.concatenate(self._tokens)[length:]
        self._number, self._built, self.pending = self._number + 1, self._built + length, len(rest)
        self.nbytes = self._context.nbytes
        self._tokens, self._states, self._scales = [], [], []
        self._append(self._tokens, rest)
        if states is not None:
            self._append(self._states, states[passed:])
        if scale is not None:
            self._append(self._scales, scale[passed:])

    def _append(self, values: list[NDArray[Any]], new: NDArray[Any]) -> None:
        """Append a copy, so that the bytes of a whole step are not kept."""
        values.append(new.copy())
        self.nbytes += new.nbytes

    def _is_repeated(self, new: NDArray[np.int32], known: int) -> bool:
        """Return whether the first ``new`` tokens equal the last ``known`` tokens of the text."""
        text = np.concatenate([self._context, *(part["token"] for part in self._tokens)])
        return np.array_equal(text[len(text) - known :][: len(new)], new[:known])
