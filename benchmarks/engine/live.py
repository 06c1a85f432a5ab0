"""Batch of running sequences that can draft in several ways at the same position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engine.isolated import SessionSource
from benchmarks.engines import ModelPair
from osd.drafting.growth import DraftBudget, Growth
from osd.drafting.session import CommittedTokens
from osd.engine.request import SamplingParams
from osd.runtime.batch import PackedRows, RowBuilder, consecutive_rows
from osd.verification import Verdict
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, TreeBuilder


@dataclass(frozen=True)
class LiveDraft:
    """Drafts of B sequences, the target's distributions ``p`` [B, N + 1, V], and the data for ``advance``.

    ``hidden`` are the tapped states of the forward. Row ``first[b]`` holds the last committed token of sequence b; the
    rows of its nodes follow.
    """

    draft: DraftBatch
    p: Tensor
    hidden: Tensor | None
    first: list[int]


class LiveBatch(SessionSource):
    """Sequences that decode in slots 0, 1, ... of a target and its drafter.

    ``calls`` is the number of times that growth policies called the drafter.
    """

    def __init__(
        self, pair: ModelPair, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, number: int
    ) -> None:
        """Read the prompts, of at least two tokens each; ``number`` keys the noise and must be unique among batches."""
        super().__init__(pair.session, list(range(len(prompts))))
        self._target, self._number = pair.target, number
        self._sampling = SamplingBatch.of([sampling] * len(prompts), pair.target.device)
        self._next = [prompt[-1] for prompt in prompts]  # committed, but not in the cache yet
        self._step = 0
        self.calls = 0
        self._after_root: Tensor | None = None
        for slot, prompt in zip(self.slots, prompts, strict=True):
            self._read(slot, prompt)

    @torch.inference_mode()
    def _read(self, slot: int, prompt: tuple[int, ...]) -> None:
        target, session = self._target, self.session
        hidden = target.forward(consecutive_rows(slot, 0, prompt[:-1]), torch.tensor([len(prompt) - 2])).hidden
        target.cache.length[slot] = len(prompt) - 1
        session.open(slot, prompt[0])
        session.commit(slot, CommittedTokens(list(prompt[1:]), hidden))

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return the logits [M, Vd] after ``nodes`` [M]; the drafter runs for each root only once per step."""
        self.calls += 1
        if self._after_root is None:
            slots = torch.arange(len(self.slots), device=rows.device)
            self._after_root = super().expand(builder, slots, torch.full_like(slots, ROOT))
        logits = self._after_root[rows]
        inner = (nodes != ROOT).nonzero().squeeze(-1)
        if len(inner):
            logits[inner] = super().expand(builder, rows[inner], nodes[inner])
        return logits

    def noise(self, purpose: int) -> Noise:
        """Return the noise of this step for a purpose; different purposes are independent."""
        index = torch.arange(len(self.slots), device=self._target.device)
        keys = torch.full_like(index, purpose), torch.full_like(index, self._step)
        return Noise(index + (self._number << 32), *keys)

    @torch.inference_mode()
    def draft(self, growth: Growth, purpose: int) -> LiveDraft:
        """Draft with the noise of ``purpose`` and compute the target's distributions, without committing tokens."""
        target = self._target
        limits = torch.full((len(self.slots),), growth.max_nodes, device=target.device)
        draft = growth.grow(self, self._sampling, self.noise(purpose), DraftBudget(limits))
        rows, first = self._pack(draft)
        forward = target.forward(rows, torch.arange(len(rows.token_ids)))
        owners = rows.slots.long().to(target.device)
        p = self._sampling.probabilities(forward.logits, owners)
        positions = torch.tensor(first, device=target.device)[:, None] + torch.minimum(
            torch.arange(draft.tokens.shape[1] + 1, device=target.device), draft.sizes[:, None]
        )
        return LiveDraft(draft, p[positions], forward.hidden, first)

    def _pack(self, draft: DraftBatch) -> tuple[PackedRows, list[int]]:
        """Pack a row per last committed token and node; return the rows and the first row of each sequence."""
        length = self._target.cache.length
        sizes, tokens, parents = draft.sizes.tolist(), draft.tokens.tolist(), draft.parents.tolist()
        builder, first = RowBuilder(), []
        for slot in self.slots:
            first.append(builder.tokens(slot, length[slot], [self._next[slot]]))
            size = sizes[slot]
            builder.draft(slot, length[slot] + 1, tokens[slot][:size], parents[slot][:size])
        return builder.build(), first

    @torch.inference_mode()
    def advance(self, drafted: LiveDraft, verdict: Verdict) -> None:
        """Commit the tokens that ``verdict`` keeps of ``drafted``, which must be the last draft."""
        paths, tokens = verdict.path.tolist(), drafted.draft.tokens.tolist()
        for slot in self.slots:
            path = paths[slot][: int(verdict.accepted[slot])]
            new = [*(tokens[slot][node] for node in path), int(verdict.token[slot])]
            kept_rows = [0, *(1 + node for node in path)]
            cache = self._target.cache
            cache.keep(slot, cache.length[slot], kept_rows)
            states = [drafted.first[slot] + offset for offset in kept_rows]
            self.session.commit(slot, CommittedTokens(new, None if drafted.hidden is None else drafted.hidden[states]))
            self._next[slot] = new[-1]
        self._step += 1
        self._after_root = None

    def close(self) -> None:
        """Close the drafter's slots; the next batch overwrites those of the target."""
        for slot in self.slots:
            self.session.close(slot)


def positions(
    pair: ModelPair,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    number: int,
    size: tuple[int, int, int],
) -> Iterator[tuple[LiveBatch, int]]:
    """Yield a running batch once per decoding step, with the number of positions so far.

    Prompts are taken in order and repeated from the start; ``number`` is the number of the first batch, which chooses
    its prompts and noise. ``size`` are the positions of the text, the sequences of a batch, and the decoding steps of a
    batch.
    """
    contexts, batch, steps = size
    done = 0
    while done < contexts:
        count = min(batch, contexts - done)
        live = LiveBatch(pair, [prompts[(number * batch + i) % len(prompts)] for i in range(count)], sampling, number)
        for _ in range(min(steps, -(-(contexts - done) // count))):
            yield live, done
            done += count
        live.close()
        number += 1
