"""Small target with known distributions, its traces, and a drafter that can learn it."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from osd.capture.trace import NOT_DRAFTED, REJECTED, Array, Trace
from osd.drafting.base import Needs
from osd.drafting.trainable import Trainable
from osd.learning.evaluation import GateFigures
from osd.target.identity import Identity

VOCABULARY, HIDDEN = 12, 12
TARGET = Identity("toy", "a" * 64, "b" * 64)


class Toy(Trainable):
    """Drafter that predicts from the last hidden state and the last token."""

    kind = "toy"
    needs = Needs(taps=(0,))

    def __init__(self, draft_ids=None):
        super().__init__()
        self._draft_ids = draft_ids
        size = VOCABULARY if draft_ids is None else len(draft_ids)
        self.table = nn.Embedding(VOCABULARY, size)
        self.read = nn.Linear(HIDDEN, size)
        nn.init.zeros_(self.table.weight)

    @property
    def draft_ids(self):
        return self._draft_ids

    def unroll(self, batch, depth, drafted=None):
        result = []
        for d in range(depth):
            seen = batch.hidden[batch.sequence, (batch.place - 2 - d).clamp(min=0)]
            tokens = batch.token_ids if drafted is None or not d else drafted
            result.append(self.table(tokens[batch.sequence, batch.place - 1]) + self.read(seen))
        return result

    @property
    def state_width(self):
        return HIDDEN

    def drafted_states(self, batch, fed, depth):
        """Return the fed token as one-hot vector plus the depth."""
        return [torch.nn.functional.one_hot(fed, HIDDEN).float() + d for d in range(depth)]

    def session(self, slots, context, scratch):
        raise NotImplementedError


class Watched(Toy):
    """Drafter that records how deep it was unrolled, and over whose tokens."""

    def __init__(self):
        super().__init__()
        self.unrolled = []

    def unroll(self, batch, depth, drafted=None):
        self.unrolled.append((depth, "target" if drafted is None else "drafter"))
        return super().unroll(batch, depth, drafted)


def target_logits(seed=0, sharpness=2.0):
    """Return logits [vocabulary, vocabulary] of the next token after each token."""
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)) * sharpness


def with_drafts(trace, drafted, verdict):
    """Return the trace with ``drafted`` and ``verdict`` [C] of a single drafter."""
    source = np.where(verdict != NOT_DRAFTED, 0, -1).astype(np.int8)
    arrays = {"drafted": drafted, "verdict": verdict.astype(np.int8), "source": source}
    return msgspec.structs.replace(trace, sources=("toy",), **{name: Array.of(array) for name, array in arrays.items()})


def with_rejections(trace, places, drafted, logits=None):
    """Return the trace with tokens ``drafted`` rejected at ``places``, and the target's distributions after them."""
    table = target_logits() if logits is None else logits
    log_p = table - np.log(np.exp(table).sum(1, keepdims=True))
    verdict, tokens = trace.verdict.numpy().copy(), trace.drafted.numpy().copy()
    verdict[places], tokens[places] = REJECTED, drafted
    rows = log_p[drafted]
    ids = np.argsort(-rows, axis=1)
    return msgspec.structs.replace(
        with_drafts(trace, tokens, verdict),
        after_ids=Array.of(ids.astype(np.int32)),
        after_logp=Array.of(np.take_along_axis(rows, ids, 1).astype(np.float16)),
        after_tail=Array.of(np.full(len(places), -np.inf, np.float16)),
    )


def make_trace(
    request_id="r",
    segment=0,
    prompt=4,
    completion=8,
    top_k=VOCABULARY,
    seed=0,
    hidden=True,
    domain="general",
    logits=None,
    width=HIDDEN,
    target=TARGET.label,
):
    """Return a trace sampled from the target; ``hidden`` states are noise."""
    rng = np.random.default_rng(seed)
    table = target_logits() if logits is None else logits
    vocabulary = len(table)
    log_p = table - np.log(np.exp(table).sum(1, keepdims=True))
    tokens = [int(token) for token in rng.integers(vocabulary, size=prompt)]
    while len(tokens) < prompt + completion:
        tokens.append(int(rng.choice(vocabulary, p=np.exp(log_p[tokens[-1]]))))
    rows = log_p[tokens[prompt - 1 : -1]]
    ids = np.argsort(-rows, axis=1)[:, :top_k]
    kept = np.take_along_axis(rows, ids, 1)
    rest = np.exp(np.sort(rows, 1)[:, : vocabulary - top_k]).sum(1)
    with np.errstate(divide="ignore"):
        tail = np.log(rest)
    states = torch.randn(prompt + completion - 1, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    none = np.full(completion, -1, np.int32)
    return Trace(
        request_id=request_id, segment=segment, domain=domain, target=target, drafter_domain=domain, drafter_version=1,
        created=0.0, temperature=1.0, top_k=0, top_p=1.0, prompt_ids=Array.of(np.array(tokens[:prompt], np.int32)),
        completion_ids=Array.of(np.array(tokens[prompt:], np.int32)), target_ids=Array.of(ids.astype(np.int32)),
        target_logp=Array.of(kept.astype(np.float16)), target_tail=Array.of(tail.astype(np.float16)),
        draft_ids=Array.of(none[:, None]), draft_logp=Array.of(np.zeros((completion, 1), np.float16)),
        draft_tail=Array.of(np.zeros(completion, np.float16)), drafted=Array.of(none),
        verdict=Array.of(np.full(completion, NOT_DRAFTED, np.int8)), sources=("toy",),
        source=Array.of(np.full(completion, -1, np.int8)),
        hidden=Array.of(states.view(torch.uint16).numpy(), "bfloat16") if hidden else None,
    )  # fmt: skip


def gate_figures(
    per_depth: tuple[float, ...], positions: int = 1, *, overlaps: Tensor | None = None, groups: Tensor | None = None,
    divergence: float = 0.0, weight: float = 1.0, kept_per_depth: tuple[float, ...] | None = None,
) -> GateFigures:  # fmt: skip
    """Return figures of a gate; by default ``kept_per_depth`` equals ``per_depth``."""
    overlaps = torch.empty(0) if overlaps is None else overlaps
    groups = torch.arange(len(overlaps)) if groups is None else groups
    kept = per_depth if kept_per_depth is None else kept_per_depth
    return GateFigures(positions, per_depth, divergence, overlaps, groups, weight, None, kept)
