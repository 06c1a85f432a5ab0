"""Trees of the most probable nodes, sized by the prices of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from osd.drafting.growth.base import DraftBudget, GrowthPlan, Source, check_positive, deepest
from osd.drafting.growth.chance_table import CountingGrowth
from osd.runtime.top import most_probable
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder

_CHILDREN = 4
_DEPTH = 8


@dataclass
class _Candidate:
    """Token that may become a node; ``node`` is the number of that node, -1 before."""

    chance: float
    row: int
    parent: int
    column: int
    depth: int
    estimate: float
    node: int = -1


class BestFirst(CountingGrowth):
    """Trees of the most probable paths of all sequences, as long as they raise tokens per second; nothing is drawn.

    Level by level, the candidates are the most probable children of the chosen nodes. The drafter is called for a level
    if its expected gain exceeds the cost of the call; some drafters grow all levels in one call
    (``osd/runtime/native/best_first.h``). The chances of candidates are counted by depth, rank and the drafter's
    probability. A drafter with calibrated chances, such as recall, proposes by these chances itself.
    """

    name: ClassVar[str] = "best_first"
    draws = frozenset({Draw.DETERMINISTIC})
    fixed_width = True
    is_priced = True

    def __init__(self, budget: int) -> None:
        """Draft at most ``budget`` tokens for a sequence."""
        check_positive(budget=budget)
        self.max_nodes = budget
        super().__init__()

    def plan_for(self, source: Source, sampling: SamplingBatch, budget: DraftBudget) -> GrowthPlan | None:
        room, drawn = self._room(budget), _drawn(sampling)
        frontier = self._roots(source, room, drawn, budget)
        if budget.step is None or not frontier:
            return None
        chosen = {row for row, _, _ in frontier}
        room = [most if row in chosen else 0 for row, most in enumerate(room)]
        levels = max(_reach(source, len(room)))
        return GrowthPlan(room, levels, _CHILDREN, *self.table.read(drawn[0]), budget.step)

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        limits, room, drawn = budget.limits, self._room(budget), _drawn(sampling)
        reach = _reach(source, len(room))
        pool: list[_Candidate] = []
        frontier = self._roots(source, room, drawn, budget)
        if not frontier:
            return DraftBatch.empty(len(room), limits.device)
        builder = TreeBuilder(len(room), max(room), source.support, limits.device)
        for depth in range(max(reach)):
            pool += self._children(builder, source, frontier, depth, drawn)
            pool.sort(key=lambda candidate: -candidate.chance)
            taken = self._take(builder, _chosen(pool, depth, budget), room, depth)
            deeper = [(row, node, chance) for row, node, chance in taken if depth + 1 < reach[row]]
            frontier = self._to_expand(deeper, depth + 1, drawn, pool, budget)
            if not frontier:
                break
        if budget.step is None:
            self._take(builder, [candidate for candidate in pool if candidate.node < 0], room, _DEPTH)
        estimates = torch.zeros(builder.tokens.shape, dtype=torch.float64)
        for candidate in pool:
            if candidate.node >= 0:
                estimates[candidate.row, candidate.node] = candidate.estimate
        draft = builder.finish(Draw.DETERMINISTIC)
        return replace(draft, estimates=estimates[:, : draft.tokens.shape[1]])

    def _room(self, budget: DraftBudget) -> list[int]:
        return [min(limit, self.max_nodes) for limit in budget.limits.tolist()]

    def _roots(
        self, source: Source, room: Sequence[int], drawn: Sequence[bool], budget: DraftBudget
    ) -> list[tuple[int, int, float]]:
        """Return the roots to expand."""
        reach = _reach(source, len(room))
        roots = [(row, ROOT, 1.0) for row, most in enumerate(room) if most > 0 and reach[row] > 0]
        return self._to_expand(roots, 0, drawn, [], budget)

    def _to_expand(
        self,
        frontier: list[tuple[int, int, float]],
        depth: int,
        drawn: Sequence[bool],
        pool: Sequence[_Candidate],
        budget: DraftBudget,
    ) -> list[tuple[int, int, float]]:
        """Return the nodes, as (row, node, chance), whose first children are expected to be worth their call."""
        if budget.step is None or not frontier:
            return frontier
        expected = [
            (chance * self.table.first_at(drawn[row], depth), (row, node, chance)) for row, node, chance in frontier
        ]
        expected.sort(key=lambda pair: -pair[0])
        step = budget.step.after(sum(candidate.node >= 0 for candidate in pool))
        price = step.price(1)
        gain, best, chosen = 0.0, 0.0, 0
        for count, (chance, _) in enumerate(expected, 1):
            gain += max(0.0, chance - price)
            value = gain - step.rho * budget.call_seconds([row for _, (row, _, _) in expected[:count]], depth)
            if value > best:
                best, chosen = value, count
        return [node for _, node in expected[:chosen]]

    def _children(
        self,
        builder: TreeBuilder,
        source: Source,
        frontier: Sequence[tuple[int, int, float]],
        depth: int,
        drawn: Sequence[bool],
    ) -> list[_Candidate]:
        """Return the most probable children of the nodes in ``frontier``."""
        device = builder.tokens.device
        rows = torch.tensor([row for row, _, _ in frontier], device=device)
        nodes = torch.tensor([node for _, node, _ in frontier], device=device)
        logits = source.expand(builder, rows, nodes)
        best = most_probable(logits, range(len(frontier)), min(_CHILDREN, logits.shape[-1]))
        parts = zip(frontier, best.ids.tolist(), best.logp.double().exp().tolist(), strict=True)
        return [
            _Candidate(reach * self.table.chance_at(drawn[row], depth, rank, share), row, node, column, depth, share)
            for (row, node, reach), columns, shares in parts
            for rank, (column, share) in enumerate(zip(columns, shares, strict=True))
        ]

    def _take(
        self, builder: TreeBuilder, chosen: Sequence[_Candidate], room: Sequence[int], depth: int
    ) -> list[tuple[int, int, float]]:
        """Add the ``chosen`` candidates as nodes while there is room; return the new nodes of the level."""
        sizes = builder.sizes.tolist()
        taken: list[_Candidate] = []
        for candidate in chosen:
            if sizes[candidate.row] < room[candidate.row]:
                candidate.node = sizes[candidate.row]
                sizes[candidate.row] += 1
                taken.append(candidate)
        if taken:
            places = torch.tensor([(c.row, c.parent, c.column) for c in taken], device=builder.tokens.device)
            builder.add(places[:, 0], places[:, 1], places[:, 2], None)
        return [(c.row, c.node, c.chance) for c in taken if c.depth == depth]


def _reach(source: Source, sequences: int) -> list[int]:
    """Return the tokens of the longest path of each sequence."""
    most, reach = deepest(source, _DEPTH), source.reach
    return [most] * sequences if reach is None else [min(most, tokens) for tokens in reach.tokens]


def _drawn(sampling: SamplingBatch) -> list[bool]:
    """Return whether each sequence is sampled; it waits for the device only if the sequences differ."""
    if sampling.all_greedy or not sampling.any_greedy:
        return [not sampling.all_greedy] * len(sampling.temperature)
    return (sampling.temperature > 0).tolist()


def _chosen(pool: Sequence[_Candidate], depth: int, budget: DraftBudget) -> list[_Candidate]:
    """Return the candidates whose value exceeds their price, the most probable first.

    Without ``DraftBudget.step``, return the candidates of this level with at least half the chance of the best one of
    their sequence; the others fill the remaining room at the end.
    """
    if budget.step is not None:
        count = budget.step.best([candidate.chance for candidate in pool])
        return [candidate for candidate in pool[:count] if candidate.node < 0]
    level = [candidate for candidate in pool if candidate.depth == depth]
    best: dict[int, float] = {}
    for candidate in level:
        best.setdefault(candidate.row, candidate.chance)
    return [candidate for candidate in level if candidate.chance >= best[candidate.row] / 2]
