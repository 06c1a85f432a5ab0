"""Running sequences whose next round can be drafted in several ways before it is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engines import Pair
from osd.drafting.growth import DraftBudget, Growth, Reach
from osd.drafting.session import CommittedTokens
from osd.engine.request import SamplingParams
from osd.runtime.batch import PackedRows, RowBuilder, consecutive_rows
from osd.verification import Verdict
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, TreeBuilder


@dataclass(frozen=True)
class Drafted:
    """Drafts of B sequences, the target's distributions ``p`` [B, N + 1, V], and what ``advance`` needs.

    ``hidden`` are the tapped states of the forward, whose row ``first[b]`` holds the last committed token of sequence
    b, right before its nodes.
    """

    draft: DraftBatch
    p: Tensor
    hidden: Tensor | None
    first: list[int]


class Live:
    """Sequences that decode in slots 0, 1, ... of a pair; ``calls`` counts what growth policies asked the drafter."""

    def __init__(self, pair: Pair, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, number: int) -> None:
        """Read the prompts, each of two tokens at least; ``number`` keys the noise and belongs to no other batch."""
        self._pair, self._number = pair, number
        self._slots = list(range(len(prompts)))
        self._sampling = SamplingBatch.of([sampling] * len(prompts), pair.target.device)
        self._next = [prompt[-1] for prompt in prompts]  # committed, but not fed yet
        self._round = 0
        self.calls = 0
        self._after_root: Tensor | None = None
        for slot, prompt in zip(self._slots, prompts, strict=True):
            self._read(slot, prompt)

    @torch.inference_mode()
    def _read(self, slot: int, prompt: tuple[int, ...]) -> None:
        target, session = self._pair.target, self._pair.session
        hidden = target.forward(consecutive_rows(slot, 0, prompt[:-1]), torch.tensor([len(prompt) - 2])).hidden
        target.cache.length[slot] = len(prompt) - 1
        session.open(slot, prompt[0])
        session.commit(slot, CommittedTokens(list(prompt[1:]), hidden))

    @property
    def support(self) -> Tensor | None:
        """[draft vocabulary] target ids, None for the whole vocabulary."""
        return self._pair.session.support

    @property
    def levels(self) -> int | None:
        """Tokens of the longest path that it drafts, None without end."""
        return self._pair.session.levels

    @property
    def reach(self) -> Reach | None:
        """How far it sees in each sequence, None where that is as far as ``levels``."""
        return self._pair.session.reach(self._slots)

    @property
    def block(self) -> int:
        """Tokens of a path that come of one call."""
        return self._pair.session.block

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """See ``osd.drafting.growth.Source``; a session can be asked about a root only once a round."""
        session = self._pair.session
        self.calls += 1
        if self._after_root is None:
            every = torch.arange(len(self._slots), device=rows.device)
            self._after_root = session.expand(self._slots, builder, every, torch.full_like(every, ROOT))
        logits = self._after_root[rows]
        inner = (nodes != ROOT).nonzero().squeeze(-1)
        if len(inner):
            logits[inner] = session.expand(self._slots, builder, rows[inner], nodes[inner])
        return logits

    def acceptance(self) -> Tensor:
        """See ``osd.drafting.growth.Source``; means something after a call that asked about no root."""
        return self._pair.session.acceptance()

    def noise(self, purpose: int) -> Noise:
        """Randomness of this round; two purposes share nothing."""
        index = torch.arange(len(self._slots), device=self._pair.target.device)
        keys = torch.full_like(index, purpose), torch.full_like(index, self._round)
        return Noise(index + (self._number << 32), *keys)

    @torch.inference_mode()
    def draft(self, growth: Growth, purpose: int) -> Drafted:
        """Draft with the noise of ``purpose``, and ask the target; nothing is committed."""
        target = self._pair.target
        limits = torch.full((len(self._slots),), growth.max_nodes, device=target.device)
        draft = growth.grow(self, self._sampling, self.noise(purpose), DraftBudget(limits))
        rows, first = self._pack(draft)
        forward = target.forward(rows, torch.arange(len(rows.token_ids)))
        owners = rows.slots.long().to(target.device)
        p = self._sampling.probabilities(forward.logits, owners)
        places = torch.tensor(first, device=target.device)[:, None] + torch.minimum(
            torch.arange(draft.tokens.shape[1] + 1, device=target.device), draft.sizes[:, None]
        )
        return Drafted(draft, p[places], forward.hidden, first)

    def _pack(self, draft: DraftBatch) -> tuple[PackedRows, list[int]]:
        """One row for each last committed token and each node, and where each sequence begins."""
        length = self._pair.target.cache.length
        sizes, tokens, parents = draft.sizes.tolist(), draft.tokens.tolist(), draft.parents.tolist()
        builder, first = RowBuilder(), []
        for slot in self._slots:
            first.append(builder.tokens(slot, length[slot], [self._next[slot]]))
            size = sizes[slot]
            builder.draft(slot, length[slot] + 1, tokens[slot][:size], parents[slot][:size])
        return builder.build(), first

    @torch.inference_mode()
    def advance(self, drafted: Drafted, verdict: Verdict) -> None:
        """Commit what ``verdict`` keeps of the drafts, which must be the last that were made."""
        paths, tokens = verdict.path.tolist(), drafted.draft.tokens.tolist()
        for slot in self._slots:
            path = paths[slot][: int(verdict.accepted[slot])]
            new = [*(tokens[slot][node] for node in path), int(verdict.token[slot])]
            kept = [0, *(1 + node for node in path)]
            cache = self._pair.target.cache
            cache.keep(slot, cache.length[slot], kept)
            at = [drafted.first[slot] + offset for offset in kept]
            self._pair.session.commit(
                slot, CommittedTokens(new, None if drafted.hidden is None else drafted.hidden[at])
            )
            self._next[slot] = new[-1]
        self._round += 1
        self._after_root = None

    def close(self) -> None:
        """Give the slots back."""
        for slot in self._slots:
            self._pair.session.close(slot)
