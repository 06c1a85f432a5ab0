"""Trees of the nodes that are most likely to be kept, as many as pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from osd.drafting.growth.base import Budget, PayingTrees, Source, deepest
from osd.drafting.growth.chance_table import CountingGrowth
from osd.runtime.top import most_probable
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

    def paying(self, source: Source, sampling: SamplingBatch, budget: Budget) -> PayingTrees | None:
        room, drawn = self._room(budget), _drawn(sampling)
        frontier = self._roots(source, room, drawn, budget)
        if budget.step is None or not frontier:
            return None
        chosen = {row for row, _, _ in frontier}
        room = [most if row in chosen else 0 for row, most in enumerate(room)]
        levels = max(_reach(source, len(room)))
        return PayingTrees(room, levels, _CHILDREN, *self.table.read(drawn[0]), budget.step)

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: Budget) -> DraftBatch:
        limits, room, drawn = budget.limits, self._room(budget), _drawn(sampling)
        reach = _reach(source, len(room))
        pool: list[_Candidate] = []
        frontier = self._roots(source, room, drawn, budget)
        if not frontier:
            return DraftBatch.empty(len(room), limits.device)
        builder = TreeBuilder(len(room), max(room), source.support, limits.device)
        for depth in range(max(reach)):
            pool += self._children(builder, source, frontier, depth, drawn)
            pool.sort(key=lambda one: -one.chance)
            taken = self._take(builder, _chosen(pool, depth, budget), room, depth)
            deeper = [one for one in taken if depth + 1 < reach[one[0]]]
            frontier = self._worth_asking(deeper, depth + 1, drawn, pool, budget)
            if not frontier:
                break
        if budget.step is None:
            self._take(builder, [one for one in pool if one.node < 0], room, _DEPTH)
        estimates = torch.zeros(builder.tokens.shape, dtype=torch.float64)
        for one in pool:
            if one.node >= 0:
                estimates[one.row, one.node] = one.estimate
        draft = builder.finish(Draw.DETERMINISTIC)
        return replace(draft, estimates=estimates[:, : draft.tokens.shape[1]])

    def _room(self, budget: Budget) -> list[int]:
        return [min(limit, self.max_nodes) for limit in budget.limits.tolist()]

    def _roots(
        self, source: Source, room: Sequence[int], drawn: Sequence[bool], budget: Budget
    ) -> list[tuple[int, int, float]]:
        reach = _reach(source, len(room))
        roots = [(row, ROOT, 1.0) for row, most in enumerate(room) if most > 0 and reach[row] > 0]
        return self._worth_asking(roots, 0, drawn, [], budget)

    def _worth_asking(
        self,
        frontier: list[tuple[int, int, float]],
        depth: int,
        drawn: Sequence[bool],
        pool: Sequence[_Candidate],
        budget: Budget,
    ) -> list[tuple[int, int, float]]:
        """The nodes to ask about: those whose first children are expected to bring more than the call takes."""
        if budget.step is None or not frontier:
            return frontier
        expected = [(one[2] * self.table.first_at(drawn[one[0]], depth), one) for one in frontier]
        expected.sort(key=lambda pair: -pair[0])
        step = budget.step.after(sum(one.node >= 0 for one in pool))
        price = step.price(1)
        gain, best, asked = 0.0, 0.0, 0
        for count, (chance, _) in enumerate(expected, 1):
            gain += max(0.0, chance - price)
            value = gain - step.rho * budget.call_seconds([one[0] for _, one in expected[:count]], depth)
            if value > best:
                best, asked = value, count
        return [one for _, one in expected[:asked]]

    def _children(
        self,
        builder: TreeBuilder,
        source: Source,
        frontier: Sequence[tuple[int, int, float]],
        depth: int,
        drawn: Sequence[bool],
    ) -> list[_Candidate]:
        """The most probable children of the nodes in ``frontier``."""
        device = builder.tokens.device
        rows = torch.tensor([row for row, _, _ in frontier], device=device)
        nodes = torch.tensor([node for _, node, _ in frontier], device=device)
        logits = source.expand(builder, rows, nodes)
        found = most_probable(logits, range(len(frontier)), min(_CHILDREN, logits.shape[-1]))
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


def _reach(source: Source, sequences: int) -> list[int]:
    """The tokens of the longest path of each sequence."""
    deep, sees = deepest(source, _DEPTH), source.reach
    return [deep] * sequences if sees is None else [min(deep, tokens) for tokens in sees.tokens]


def _drawn(sampling: SamplingBatch) -> list[bool]:
    """Whether each sequence draws; the device is only asked where they differ."""
    if sampling.all_greedy or not sampling.any_greedy:
        return [not sampling.all_greedy] * len(sampling.temperature)
    return (sampling.temperature > 0).tolist()


def _chosen(pool: Sequence[_Candidate], depth: int, budget: Budget) -> list[_Candidate]:
    """Return the candidates that pay, the most probable first.

    Without ``Budget.step`` they are those of this level that are at least half as probable as the best of their
    sequence; the others take what room is left in the end.
    """
    if budget.step is not None:
        count = budget.step.best([one.chance for one in pool])
        return [one for one in pool[:count] if one.node < 0]
    level = [one for one in pool if one.depth == depth]
    best: dict[int, float] = {}
    for one in level:
        best.setdefault(one.row, one.chance)
    return [one for one in level if one.chance >= best[one.row] / 2]
