"""Conversion of traces to the tensors of a micro-step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from osd.capture.trace import AFTER, PER_TOKEN, REJECTED, Array, Trace, TraceError
from osd.learning.targets import OnPolicySamples, TopKTargets, on_policy_samples

PROMPT_SHARE = 8
"""Number of prompt tokens that cost as much training time as one completion token."""

_POSITIONS = ("sequence", "place", "target_ids", "target_logp", "target_tail", "drafted", "verdict")

RecordPart = tuple[str, int, int, int]
"""Identity of a record or of a part: request id, segment, prompt tokens of the part, and its completion tokens."""


@dataclass
class DistillBatch:
    """Batch of B sequences with N completion positions, which are stored flat.

    Attributes:
        token_ids: [B, L] prompt and completion, padded with 0 on the right.
        lengths: [B] number of tokens of each sequence.
        hidden: [B, L, taps * hidden] float32 states of the tapped target layers; 0 for tokens that the target did not
            read (the last token); None when the drafter reads no states.
        sequence: [N] row of ``token_ids``.
        place: [N] index of the completion token in its sequence. The captured distribution predicts this token. The
            drafter predicts it from ``token_ids[:place]`` and ``hidden[:place - 1]``.
        target_ids: [N, K] most probable ids of the target, -1 for none.
        target_logp: [N, K] their log-probabilities, float32.
        target_tail: [N] log-mass of all other ids, float32.
        drafted: [N] drafted token at the position, -1 for none.
        verdict: [N] NOT_DRAFTED, ACCEPTED or REJECTED.
        completes: [B] bool, sequences of text completions, whose prompt is not a chat.
        greedy: [B] bool, sequences of greedy requests.
        on_policy: distributions after the drafter's own tokens; None when no trace has them.
        weight: [N] weight of each position in an evaluation; None for weight 1.
        trace_weight: [N] float64 number of positions of the traffic that each position represents; None when all
            traffic was captured.
        max_trace_weight: the largest ``trace_weight`` of all batches of the same evaluation.
        records: [B] identities of the records; empty after ``select``.
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
    on_policy: OnPolicySamples | None = None
    weight: Tensor | None = None
    trace_weight: Tensor | None = None
    max_trace_weight: float = 1.0
    records: Sequence[RecordPart] = ()

    @property
    def positions(self) -> int:
        """Number of completion positions, N."""
        return len(self.place)

    def select(self, positions: Tensor) -> Self:
        """Return the sequences with some of the N positions ([M] indices or [N] bool), without on-policy samples."""
        chosen = {name: getattr(self, name)[positions] for name in _POSITIONS}
        for name in ("weight", "trace_weight"):
            values = getattr(self, name)
            chosen[name] = None if values is None else values[positions.to(values.device)]
        return replace(self, **chosen, on_policy=None, records=())

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device; ``weight`` and ``trace_weight`` stay on the host, where figures are summed."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if field.name not in ("weight", "trace_weight")
            and isinstance(value := getattr(self, field.name), Tensor | OnPolicySamples)
        }
        return replace(self, **moved)

    def rows_at(self, depth: int) -> Tensor:
        """Return which positions a drafter can predict after ``depth`` steps on its own outputs, [N] bool."""
        return self.place - 1 - depth >= 1


def length(trace: Trace) -> int:
    """Return the number of tokens of a trace, prompt and completion."""
    return trace.prompt_ids.shape[0] + trace.completion_ids.shape[0]


def check(trace: Trace, vocabulary: int, width: int) -> None:
    """Check that a record can be trained on.

    Args:
        trace: the record, with arrays of matching shapes.
        vocabulary: the number of the target's ids.
        width: the drafter's width of hidden states (taps * hidden), 0 when it reads none.

    Raises:
        TraceError: ids, probabilities or hidden states do not fit the target or the drafter.
    """
    prompt, completion = trace.prompt_ids.numpy(), trace.completion_ids.numpy()
    if not len(prompt) or not len(completion):
        raise TraceError("the record has an empty prompt or completion")
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
            shape = "none" if trace.hidden is None else str(trace.hidden.shape)
            raise TraceError(f"the drafter reads hidden states of width {width}, the record has {shape}")
        states = trace.states
        if states is None or not np.isfinite(states).all():
            raise TraceError("hidden has values that are not finite")


def _check_ids(name: str, tokens: np.ndarray, lowest: int, vocabulary: int) -> None:
    if tokens.dtype.kind not in "iu" or tokens.min() < lowest or tokens.max() >= vocabulary:
        raise TraceError(f"{name} has an id outside the target's vocabulary of {vocabulary}")


def _check_distributions(name: str, ids: Array, logp: Array, tail: Array, vocabulary: int) -> None:
    kept, logs, rest = ids.numpy(), logp.numpy(), tail.numpy()
    if logs.shape != kept.shape or logs.ndim != 2 or rest.ndim != 1:
        raise TraceError(f"{name}_ids {kept.shape}, {name}_logp {logs.shape} and {name}_tail {rest.shape} do not match")
    _check_ids(f"{name}_ids", kept, -1, vocabulary)
    # Half precision changes a logarithm by at most 2^-11 of its size, so 0.1 is far above any rounding error.
    with np.errstate(invalid="ignore"):
        mass = np.exp(logs.astype(np.float32)).sum(1) + np.exp(rest.astype(np.float32))
    if not np.all(np.abs(mass - 1) < 0.1):
        raise TraceError(f"{name}_logp and {name}_tail do not sum to one")


def cost(trace: Trace) -> float:
    """Return the training cost of a trace in completion tokens; a prompt token counts 1 / ``PROMPT_SHARE``."""
    return trace.completion_ids.shape[0] + trace.prompt_ids.shape[0] / PROMPT_SHARE


def cut(trace: Trace, tokens: int, first: int) -> Trace:
    """Return a part of a trace that costs at most ``tokens``.

    The part predicts up to ``tokens / 2`` completion positions from position ``first`` on. Its prompt consists of the
    tokens directly before them, up to the remaining cost. The drafter does not see the tokens before this prompt,
    although the hidden states depend on them.
    """
    prompt, completion = trace.prompt_ids.shape[0], trace.completion_ids.shape[0]
    positions = max(tokens // 2, 1)
    stop = min(first + positions, completion)
    begin = max(prompt + first - positions * PROMPT_SHARE, 0)
    sequence = np.concatenate([trace.prompt_ids.numpy(), trace.completion_ids.numpy()])
    states = {
        name: array and Array.of(array.numpy()[begin : prompt + stop - 1], array.dtype)
        for name, array in (("hidden", trace.hidden), ("hidden_scale", trace.hidden_scale))
    }
    rejected = trace.verdict.numpy() == REJECTED
    after = slice(int(rejected[:first].sum()), int(rejected[:stop].sum()))
    return msgspec.structs.replace(
        trace,
        prompt_ids=Array.of(sequence[begin : prompt + first]),
        completion_ids=Array.of(sequence[prompt + first : prompt + stop]),
        **states,
        completes=trace.completes and not first,  # a later part has generated tokens in its prompt
        **{name: Array.of(getattr(trace, name).numpy()[first:stop]) for name in PER_TOKEN},
        **{name: kept and Array.of(kept.numpy()[after]) for name, kept in zip(AFTER, trace.after, strict=True)},
    )


def windows(trace: Trace, tokens: int) -> Iterator[Trace]:
    """Yield parts of a trace that cost at most ``tokens`` and together predict each completion position once."""
    if cost(trace) <= tokens:
        yield trace
        return
    for first in range(0, trace.completion_ids.shape[0], max(tokens // 2, 1)):
        yield cut(trace, tokens, first)


def pack(traces: Iterable[Trace], tokens: int) -> Iterator[list[Trace]]:
    """Yield micro-batches of traces, in order, that cost at most ``tokens`` including padding.

    A trace with a higher cost is first cut into windows.
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
    """Pad traces into one batch on a device.

    Log-probabilities and tail are renormalised together, because half precision changes their sum by up to 0.001.
    ``hidden`` is present only if every trace has it.
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
        records=[
            (trace.request_id, trace.segment, trace.prompt_ids.shape[0], trace.completion_ids.shape[0])
            for trace in traces
        ],
    )
    if any(trace.weight != 1 for trace in traces):
        weights = torch.tensor([trace.weight for trace in traces], dtype=torch.float64)
        batch.trace_weight, batch.max_trace_weight = weights[batch.sequence], float(weights.max())
    if any(trace.after_ids is not None for trace in traces):
        batch.on_policy = on_policy_samples(traces, token_ids, target)
    return batch.to(torch.device(device))
