"""Trees of the nodes that are most likely to be kept, as many as pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from osd.drafting.growth.base import Expander, deepest
from osd.drafting.growth.chance_table import CountingGrowth
from osd.drafting.worth import Bill, PayingTrees
from osd.runtime.top import top
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder

_CHILDREN = 4
_DEPTH = 8


@dataclass
class _Candidate:
    """A token that may become a node; ``node`` is its number then."""

    chance: float
    row: int
    parent: int
    column: int
    depth: int
    estimate: float
    node: int = -1


class BestFirst(CountingGrowth):
    """The most probable paths, of all sequences together as many as raise tokens per second; nothing is drawn.

    A drafter that has calibrated chances of its own, such as recall, proposes by these. Of a drafter that gives
    distributions the most probable children of the nodes that pay are looked at, level by level, and it is asked again
    as long as what it is expected to add is worth the call; where it can, it does all of that in one call itself
    (``osd/runtime/native/best_first.h``). How probably a candidate is kept is counted by depth, rank and the drafter's
    probability.
    """

    name: ClassVar[str] = "best_first"
    draws = frozenset({Draw.DETERMINISTIC})
    fixed_width = True
    by_worth = True

    def __init__(self, budget: int) -> None:
        """Draft at most ``budget`` tokens for a sequence."""
        if budget < 1:
            raise ValueError(f"budget must be at least 1, not {budget}")
        self.max_nodes = budget
        super().__init__()

    def grow(self, expand: Expander, sampling: SamplingBatch, noise: Noise, limits: Tensor) -> DraftBatch:
        """See ``Growth.grow``: as many nodes as there may be."""
        return self._grow(expand, sampling, limits, None)

    def grow_paying(
        self, expand: Expander, sampling: SamplingBatch, noise: Noise, limits: Tensor, bill: Bill
    ) -> DraftBatch:
        return self._grow(expand, sampling, limits, bill)

    def _grow(self, expand: Expander, sampling: SamplingBatch, limits: Tensor, bill: Bill | None) -> DraftBatch:
        room = [min(limit, self.max_nodes) for limit in limits.tolist()]
        reach, drawn = _reach(expand, len(room)), _drawn(sampling)
        pool: list[_Candidate] = []
        roots = [(row, ROOT, 1.0) for row, most in enumerate(room) if most > 0 and reach[row] > 0]
        frontier = self._worth_asking(roots, 0, drawn, pool, bill)
        if not frontier:
            return DraftBatch.empty(len(room), limits.device)
        if bill is not None:
            asked = {row for row, _, _ in frontier}
            mine = [most if row in asked else 0 for row, most in enumerate(room)]
            wanted = PayingTrees(mine, max(reach), _CHILDREN, *self.table.read(drawn[0]), bill.worth)
            if (grown := bill.grown(wanted)) is not None:
                return grown
        builder = TreeBuilder(len(room), max(room), expand.support, limits.device)
        for depth in range(max(reach)):
            pool += self._children(builder, expand, frontier, depth, drawn)
            pool.sort(key=lambda one: -one.chance)
            taken = self._take(builder, _chosen(pool, depth, bill, len(room)), room, depth)
            deeper = [one for one in taken if depth + 1 < reach[one[0]]]
            frontier = self._worth_asking(deeper, depth + 1, drawn, pool, bill)
            if not frontier:
                break
        if bill is None:
            self._take(builder, [one for one in pool if one.node < 0], room, _DEPTH)
        estimates = torch.zeros(builder.tokens.shape, dtype=torch.float64)
        for one in pool:
            if one.node >= 0:
                estimates[one.row, one.node] = one.estimate
        draft = builder.finish(Draw.DETERMINISTIC)
        return replace(draft, estimates=estimates[:, : draft.tokens.shape[1]])

    def _worth_asking(
        self,
        frontier: list[tuple[int, int, float]],
        depth: int,
        drawn: Sequence[bool],
        pool: Sequence[_Candidate],
        bill: Bill | None,
    ) -> list[tuple[int, int, float]]:
        """The nodes to ask about: those whose first children are expected to bring more than the call takes."""
        if bill is None or not frontier:
            return frontier
        expected = [(one[2] * self.table.first_at(drawn[one[0]], depth), one) for one in frontier]
        expected.sort(key=lambda pair: -pair[0])
        taken = [one.chance for one in pool if one.node >= 0]
        present = bill.worth.after(len(taken), sum(taken))
        speed = present.speed
        price = present.price(1, speed)
        gain, best, asked = 0.0, 0.0, 0
        for count, (chance, _) in enumerate(expected, 1):
            gain += max(0.0, chance - price)
            value = gain - speed * bill.call([one[0] for _, one in expected[:count]], depth)
            if value > best:
                best, asked = value, count
        return [one for _, one in expected[:asked]]

    def _children(
        self,
        builder: TreeBuilder,
        expand: Expander,
        frontier: Sequence[tuple[int, int, float]],
        depth: int,
        drawn: Sequence[bool],
    ) -> list[_Candidate]:
        """The most probable children of the nodes in ``frontier``."""
        device = builder.tokens.device
        rows = torch.tensor([row for row, _, _ in frontier], device=device)
        nodes = torch.tensor([node for _, node, _ in frontier], device=device)
        logits = expand(builder, rows, nodes)
        found = top(logits, range(len(frontier)), min(_CHILDREN, logits.shape[-1]))
        parts = zip(frontier, found.ids.tolist(), found.logp.double().exp().tolist(), strict=True)
        return [
            _Candidate(reach * self.table.chance_at(drawn[row], depth, rank, share), row, node, column, depth, share)
            for (row, node, reach), columns, shares in parts
            for rank, (column, share) in enumerate(zip(columns, shares, strict=True))
        ]

    def _take(
        self, builder: TreeBuilder, chosen: Sequence[_Candidate], room: Sequence[int], depth: int
    ) -> list[tuple[int, int, float]]:
        """Make nodes of candidates, from the most probable on; returns the new ones of this level."""
        sizes = builder.sizes.tolist()
        taken: list[_Candidate] = []
        for one in chosen:
            if sizes[one.row] < room[one.row]:
                one.node = sizes[one.row]
                sizes[one.row] += 1
                taken.append(one)
        if taken:
            places = torch.tensor([(one.row, one.parent, one.column) for one in taken], device=builder.tokens.device)
            builder.add(places[:, 0], places[:, 1], places[:, 2], None)
        return [(one.row, one.node, one.chance) for one in taken if one.depth == depth]


def _reach(expand: Expander, sequences: int) -> list[int]:
    """The tokens of the longest path of each sequence."""
    deep, sees = deepest(expand, _DEPTH), expand.reach
    return [deep] * sequences if sees is None else [min(deep, tokens) for tokens in sees.tokens]


def _drawn(sampling: SamplingBatch) -> list[bool]:
    """Whether each sequence draws; the device is only asked where they differ."""
    if sampling.all_greedy or not sampling.any_greedy:
        return [not sampling.all_greedy] * len(sampling.temperature)
    return (sampling.temperature > 0).tolist()


def _chosen(pool: Sequence[_Candidate], depth: int, bill: Bill | None, sequences: int) -> list[_Candidate]:
    """Of the candidates, from the most probable on, those that pay.

    Without a ``bill`` those of this level that are at least half as probable as the best of their sequence; the others
    take what room is left in the end.
    """
    if bill is not None:
        count = bill.worth.best([one.chance for one in pool], sequences)
        return [one for one in pool[:count] if one.node < 0]
    level = [one for one in pool if one.depth == depth]
    best: dict[int, float] = {}
    for one in level:
        best.setdefault(one.row, one.chance)
    return [one for one in level if one.chance >= best[one.row] / 2]
