"""Drafts of sequences alike, verified by a device that is waited for once.

What decides about all of them becomes one tensor of integers: who has read it knows every draft and what is kept of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from osd.drafting.session import Chains, Tree
from osd.engine.sequence import Sequence as Decoding
from osd.runtime.device import sent
from osd.verification import Rule
from osd.verification.base import Walk
from osd.verification.distributions import MadeProbabilities
from osd.verification.naive import Naive
from osd.verification.noise import Noise, Purpose
from osd.verification.tree import DraftBatch


@dataclass(frozen=True)
class SingleRead:
    """How the drafts of some sequences are verified: looked up in what the target says, or judged by the ``rule``.

    Those are looked up that are ``greedy``, which all are or none, or repeatable: no text of these may depend on what
    was drafted or where rounds ended. So is every draft where the rule is ``naive``. That is lossless for any draft.
    ``trees`` are the drafts; of ``pending`` chains the host has not read the tokens, and each tree is as large as its
    chain may be. Looked up drafts are followed by ``walk``.
    """

    sequences: Sequence[Decoding]
    trees: Sequence[Tree]
    pending: Chains | None
    rule: Rule
    walk: Walk
    greedy: bool

    @cached_property
    def _looked_up(self) -> list[int]:
        every = self.greedy or isinstance(self.rule, Naive)
        return [b for b, s in enumerate(self.sequences) if every or s.request.sampling.repeatable]

    @cached_property
    def _judged(self) -> list[int]:
        return sorted(set(range(len(self.sequences))) - set(self._looked_up))

    def drawn(self, p: Tensor, draft: Callable[[], DraftBatch], noise: Noise) -> Tensor:
        """[n] int64 what ``with_draft`` takes where tokens are drawn.

        ``p`` [R, vocabulary] are the target's distributions after each root and its nodes, of one sequence after
        another. ``draft`` gives that of all sequences, where the rule judges any.
        """
        places = layout(self.trees)[1]
        told = [self._draws(p, places)] if self._looked_up else []
        if self._judged:
            chosen = sent(self._judged, p.device)
            mine = sent([place for b in self._judged for place in places[b]], p.device).view(len(chosen), -1)
            verdict = self.rule.verify(draft().select(chosen), MadeProbabilities(p, mine), noise.rows(chosen))
            told += [verdict.path.flatten(), verdict.accepted, verdict.token]
        return torch.cat(told)

    def _draws(self, p: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
        """[n] a token from p after the root and after each node of drafts that are looked up, as ``Naive`` draws it.

        Those of repeatable sequences are drawn by their places in the text, the others by their depth.
        """
        owners: list[int] = []
        rows: list[int] = []
        index: list[int] = []
        chosen = [self.sequences[b] for b in self._looked_up]
        for number, (b, s) in enumerate(zip(self._looked_up, chosen, strict=True)):
            depths = [0]
            for parent in self.trees[b].parents:
                depths.append(1 + depths[1 + parent])
            owners += [number] * len(depths)
            rows += places[b][: len(depths)]
            index += [depth + (len(s.tokens) if s.request.sampling.repeatable else 0) for depth in depths]
        steps = [0 if s.request.sampling.repeatable else s.step for s in chosen]
        noise = Noise.of_seeds([s.request.sampling.seed for s in chosen], steps, p.device)
        return noise.rows(sent(owners, p.device)).pick(p[sent(rows, p.device)], Purpose.BONUS, sent(index, p.device))

    def with_draft(self, told: Tensor) -> Tensor:
        """[n] int64 all that ``decided`` reads: the most probable tokens of all rows, or what ``drawn`` gives."""
        if self.pending is None:
            return told
        return torch.cat([told, self.pending.sizes, self.pending.drafted.flatten()])

    def decided(self, read: Sequence[int]) -> list[tuple[Tree, list[int], int]]:
        """Each draft, the nodes of it that are kept, and the token after them, by what ``with_draft`` gave."""
        numbers, trees = iter(read), self.trees
        said = [list(islice(numbers, 1 + len(trees[b].tokens))) for b in self._looked_up]
        behind = 0 if self.pending is None else self.pending.sizes.numel() + self.pending.drafted.numel()
        count = len(self._judged)
        deepest = (len(read) - sum(map(len, said)) - behind) // count - 2 if count else 0
        paths = [list(islice(numbers, deepest)) for _ in range(count)]
        accepted, following = list(islice(numbers, count)), list(islice(numbers, count))
        if self.pending is not None:
            batch, levels = self.pending.drafted.shape
            sizes = list(islice(numbers, batch))
            known = [list(islice(numbers, levels))[:size] for size in sizes]
            trees = [tree.with_tokens(tokens) for tree, tokens in zip(trees, known, strict=True)]
        found: dict[int, tuple[Tree, list[int], int]] = {}
        for b, mine in zip(self._looked_up, said, strict=True):
            tree = trees[b]
            found[b] = (tree, *self.walk(tree.tokens, tree.parents, mine[: 1 + len(tree.tokens)]))
        for b, path, kept, token in zip(self._judged, paths, accepted, following, strict=True):
            found[b] = (trees[b], path[:kept], token)
        return [found[b] for b in range(len(trees))]


def layout(trees: Sequence[Tree]) -> tuple[list[int], list[list[int]]]:
    """The sequence of each row after a root or node, and the rows of each sequence, filled up to as many for all."""
    width = 1 + max(len(tree.tokens) for tree in trees)
    owners: list[int] = []
    places: list[list[int]] = []
    for b, tree in enumerate(trees):
        size = len(tree.tokens)
        places.append([len(owners) + min(i, size) for i in range(width)])
        owners += [b] * (1 + size)
    return owners, places
