"""Traces as tensors: what one micro-step trains on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from osd.capture.trace import AFTER, PER_TOKEN, REJECTED, Array, Trace, TraceError
from osd.learning.targets import OwnSamples, TopKTargets, own_samples

PROMPT_SHARE = 8
"""Prompt tokens that cost as much as one completion token."""

_POSITIONS = ("sequence", "place", "target_ids", "target_logp", "target_tail", "drafted", "verdict")

Record = tuple[str, int, int, int]
"""A record, or a part of one: (request_id, segment), tokens before those that are predicted, and how many are."""


@dataclass
class DistillBatch:
    """B sequences and the N completion positions in them, flat.

    Attributes:
        token_ids: [B, L] prompt and completion, right padded with 0.
        lengths: [B] tokens of each sequence.
        hidden: [B, L, taps * hidden] float32 states of the tapped target layers, 0 where there is none (the last token
            was never fed), or None when the drafter reads none.
        sequence: [N] row of ``token_ids``.
        place: [N] index in the sequence of the completion token whose distribution was captured. The drafter that
            predicts it has seen ``token_ids[:place]`` and ``hidden[:place - 1]``.
        target_ids: [N, K] most probable ids of the target there, -1 for none.
        target_logp: [N, K] their log-probabilities, float32.
        target_tail: [N] log-mass of all other ids, float32.
        drafted: [N] the token that was drafted there, -1 for none.
        verdict: [N] NOT_DRAFTED, ACCEPTED or REJECTED.
        completes: [B] bool, the sequences whose prompt is the text that the completion goes on with, and no chat.
        greedy: [B] bool, the sequences of greedy requests.
        own: what the drafter's own tokens would have led to, None when no trace says.
        weight: [N] how much of each position counts when a drafter is judged, None for all of it.
        stands_for: [N] float64 how many positions of the traffic each stands for, where not all of it was kept.
        heaviest: the largest ``stands_for`` of all batches that are judged together.
        records: [B] what each sequence is made of, nothing where ``select`` left out positions.
    """

    token_ids: Tensor
    lengths: Tensor
    hidden: Tensor | None
    sequence: Tensor
    place: Tensor
    target_ids: Tensor
    target_logp: Tensor
    target_tail: Tensor
    drafted: Tensor
    verdict: Tensor
    completes: Tensor
    greedy: Tensor
    own: OwnSamples | None = None
    weight: Tensor | None = None
    stands_for: Tensor | None = None
    heaviest: float = 1.0
    records: Sequence[Record] = ()

    @property
    def positions(self) -> int:
        """N, the completion positions that are predicted."""
        return len(self.place)

    def select(self, positions: Tensor) -> Self:
        """The same sequences with some of the N positions, [M] or [N] bool, and nothing of the drafter's own tokens."""
        chosen = {name: getattr(self, name)[positions] for name in _POSITIONS}
        for name in ("weight", "stands_for"):
            values = getattr(self, name)
            chosen[name] = None if values is None else values[positions.to(values.device)]
        return replace(self, **chosen, own=None, records=())

    def to(self, device: torch.device) -> Self:
        """The same on a device; ``weight`` and ``stands_for`` stay: what is judged is counted on the host."""
        moved = {
            one.name: value.to(device)
            for one in fields(self)
            if one.name not in ("weight", "stands_for")
            and isinstance(value := getattr(self, one.name), Tensor | OwnSamples)
        }
        return replace(self, **moved)

    def rows_at(self, depth: int) -> Tensor:
        """Which of the N positions a drafter can predict with ``depth`` of its own outputs fed back, [N] bool."""
        return self.place - 1 - depth >= 1


def length(trace: Trace) -> int:
    """Tokens of a trace, prompt and completion."""
    return trace.prompt_ids.shape[0] + trace.completion_ids.shape[0]


def check(trace: Trace, vocabulary: int, width: int) -> None:
    """Check that a record can be trained on; its arrays fit each other already.

    ``vocabulary`` is the number of the target's ids, ``width`` taps * hidden of the drafter, 0 when it reads no states.

    Raises:
        TraceError: ids, probabilities or hidden states are not what the drafter needs.
    """
    prompt, completion = trace.prompt_ids.numpy(), trace.completion_ids.numpy()
    if not len(prompt) or not len(completion):
        raise TraceError("the record has no prompt or no completion")
    drafted = trace.drafted.numpy()
    for name, tokens, lowest in (
        ("prompt_ids", prompt, 0), ("completion_ids", completion, 0), ("drafted", drafted, -1)
    ):  # fmt: skip
        _check_ids(name, tokens, lowest, vocabulary)
    _check_distributions("target", trace.target_ids, trace.target_logp, trace.target_tail, vocabulary)
    if trace.after_ids and trace.after_logp and trace.after_tail:
        _check_distributions("after", trace.after_ids, trace.after_logp, trace.after_tail, vocabulary)
    if width:
        if trace.hidden is None or trace.hidden.numpy().ndim != 2 or trace.hidden.shape[1] != width:
            found = "none" if trace.hidden is None else str(trace.hidden.shape)
            raise TraceError(f"the drafter reads hidden states of width {width}, the record has {found}")
        states = trace.states
        if states is None or not np.isfinite(states).all():
            raise TraceError("hidden has a number that is not finite")


def _check_ids(name: str, tokens: np.ndarray, lowest: int, vocabulary: int) -> None:
    if tokens.dtype.kind not in "iu" or tokens.min() < lowest or tokens.max() >= vocabulary:
        raise TraceError(f"{name} has an id outside the target's vocabulary of {vocabulary}")


def _check_distributions(name: str, ids: Array, logp: Array, tail: Array, vocabulary: int) -> None:
    kept, logs, rest = ids.numpy(), logp.numpy(), tail.numpy()
    if logs.shape != kept.shape or logs.ndim != 2 or rest.ndim != 1:
        raise TraceError(f"{name}_ids {kept.shape}, {name}_logp {logs.shape} and {name}_tail {rest.shape} do not fit")
    _check_ids(f"{name}_ids", kept, -1, vocabulary)
    # A half-precision log is off by 2^-11 of its size at most; what misses by a tenth was never a distribution.
    with np.errstate(invalid="ignore"):
        mass = np.exp(logs.astype(np.float32)).sum(1) + np.exp(rest.astype(np.float32))
    if not np.all(np.abs(mass - 1) < 0.1):
        raise TraceError(f"{name}_logp and {name}_tail do not add up to one")


def cost(trace: Trace) -> float:
    """What training on a trace costs, in completion tokens: a prompt's token is only read, and counts an eighth."""
    return trace.completion_ids.shape[0] + trace.prompt_ids.shape[0] / PROMPT_SHARE


def cut(trace: Trace, tokens: int, first: int) -> Trace:
    """A part of a trace that costs at most ``tokens``.

    It predicts up to half of ``tokens`` completion positions from position ``first`` on; the tokens before them are
    its prompt. What lies further back is out of the drafter's sight, though the hidden states have seen it.
    """
    prompt, completion = trace.prompt_ids.shape[0], trace.completion_ids.shape[0]
    places = max(tokens // 2, 1)
    stop = min(first + places, completion)
    begin = max(prompt + first - places * PROMPT_SHARE, 0)
    everything = np.concatenate([trace.prompt_ids.numpy(), trace.completion_ids.numpy()])
    states = {
        name: array and Array.of(array.numpy()[begin : prompt + stop - 1], array.dtype)
        for name, array in (("hidden", trace.hidden), ("hidden_scale", trace.hidden_scale))
    }
    rejected = trace.verdict.numpy() == REJECTED
    lost = slice(int(rejected[:first].sum()), int(rejected[:stop].sum()))
    return msgspec.structs.replace(
        trace,
        prompt_ids=Array.of(everything[begin : prompt + first]),
        completion_ids=Array.of(everything[prompt + first : prompt + stop]),
        **states,
        completes=trace.completes and not first,  # else the prompt has generated tokens
        **{name: Array.of(getattr(trace, name).numpy()[first:stop]) for name in PER_TOKEN},
        **{name: kept and Array.of(kept.numpy()[lost]) for name, kept in zip(AFTER, trace.after, strict=True)},
    )


def windows(trace: Trace, tokens: int) -> Iterator[Trace]:
    """Cut a trace into parts that cost at most ``tokens`` and predict each completion position once."""
    if cost(trace) <= tokens:
        yield trace
        return
    for first in range(0, trace.completion_ids.shape[0], max(tokens // 2, 1)):
        yield cut(trace, tokens, first)


def pack(traces: Iterable[Trace], tokens: int) -> Iterator[list[Trace]]:
    """Group traces, in order, into micro-batches that cost at most ``tokens``, padding included.

    What costs more alone is cut into windows first.
    """
    group: list[Trace] = []
    widest = 0.0
    for trace in traces:
        for part in windows(trace, tokens):
            widest = max(widest, cost(part))
            if group and widest * (len(group) + 1) > tokens:
                yield group
                group, widest = [], cost(part)
            group.append(part)
    if group:
        yield group


def collate(traces: list[Trace], device: torch.device | str = "cpu") -> DistillBatch:
    """Pad traces into one batch.

    The kept log-probabilities and the tail are renormalised together: half precision leaves them off by up to a
    thousandth. ``hidden`` is kept only when every trace has it.
    """
    size, longest = len(traces), max(length(trace) for trace in traces)
    rows = sum(trace.completion_ids.shape[0] for trace in traces)
    token_ids = np.zeros((size, longest), np.int64)
    kept = (array.shape[1] for trace in traces for array in (trace.target_ids, trace.after_ids) if array is not None)
    target = TopKTargets(rows, max(kept))
    sequence, place, drafted, verdict = (np.empty(rows, np.int64) for _ in range(4))
    hidden = None
    if all(trace.hidden is not None for trace in traces):
        width = traces[0].hidden.shape[1] if traces[0].hidden is not None else 0
        hidden = np.zeros((size, longest, width), np.float32)
    start = 0
    for row, trace in enumerate(traces):
        prompt, completion = trace.prompt_ids.shape[0], trace.completion_ids.shape[0]
        here = np.arange(start, start + completion)
        token_ids[row, :prompt] = trace.prompt_ids.numpy()
        token_ids[row, prompt : prompt + completion] = trace.completion_ids.numpy()
        sequence[here] = row
        place[here] = prompt + np.arange(completion)
        target.put(here, trace.target_ids.numpy(), trace.target_logp.numpy(), trace.target_tail.numpy())
        drafted[here] = trace.drafted.numpy()
        verdict[here] = trace.verdict.numpy()
        if hidden is not None:
            hidden[row, : prompt + completion - 1] = trace.states
        start += completion
    batch = DistillBatch(
        torch.from_numpy(token_ids),
        torch.tensor([length(trace) for trace in traces]),
        None if hidden is None else torch.from_numpy(hidden),
        torch.from_numpy(sequence),
        torch.from_numpy(place),
        *target.tensors(),
        torch.from_numpy(drafted),
        torch.from_numpy(verdict),
        completes=torch.tensor([trace.completes for trace in traces]),
        greedy=torch.tensor([trace.temperature == 0 for trace in traces]),
        records=[(one.request_id, one.segment, one.prompt_ids.shape[0], one.completion_ids.shape[0]) for one in traces],
    )
    if any(trace.weight != 1 for trace in traces):
        weights = torch.tensor([trace.weight for trace in traces], dtype=torch.float64)
        batch.stands_for, batch.heaviest = weights[batch.sequence], float(weights.max())
    if any(trace.after_ids is not None for trace in traces):
        batch.own = own_samples(traces, token_ids, target)
    return batch.to(torch.device(device))
