"""Trees that grow where the drafter is most likely to be right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from osd.drafting.growth.base import DraftBudget, Source, check_positive, expanded, reaches
from osd.drafting.growth.chance_table import ChanceTable, CountingGrowth
from osd.drafting.growth.sibling_sampler import SiblingSampler
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder, repeats


class DynamicTree(CountingGrowth):
    """Tree whose next token is drawn where it is most likely to be accepted.

    With a budget alone, the place with the highest chance gets the next draw until the budget is used. The drafter
    expands a node only when its first child is due. The chance of a place is the chance of the path to it times the
    counted acceptance rate of such children, by depth, rank and the largest remaining probability of the drafter.

    With a ``threshold``, one forward expands a whole level, and every place worth at least the threshold is drawn. The
    value of the next child is the drafter's probability of the path to the node times the remaining mass after its
    earlier children. Values never depend on coming draws, and no drawn token is dropped, so both ways are lossless.

    Xiong et al., "DySpec: faster speculative decoding with dynamic token tree structure", WWW 2025, algorithms 1 and 2.
    """

    name: ClassVar[str] = "dynamic_tree"
    draws = frozenset({Draw.WITHOUT_REPLACEMENT})

    def __init__(self, budget: int, threshold: float | None = None) -> None:
        """Draft at most ``budget`` tokens, and with ``threshold`` only places that are worth at least that."""
        check_positive(budget=budget)
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
        self.max_nodes, self.threshold = budget, threshold
        super().__init__()

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        limits = budget.limits.clamp(max=self.max_nodes)
        builder = TreeBuilder(len(limits), int(limits.max()), source.support, limits.device)
        sampler = SiblingSampler(builder, Draw.WITHOUT_REPLACEMENT, sampling.temperature == 0)
        levels = reaches(source, limits, builder.capacity)
        trees = _Trees(builder, sampler, source, sampling.for_trees(), noise, limits, levels)
        if self.threshold is not None:
            trees.grow_by_level(self.threshold)
            return sampler.finish()
        estimates = trees.grow_by_chance(self.table, sampling.temperature > 0)
        draft = sampler.finish()
        return replace(draft, estimates=estimates[:, : draft.tokens.shape[1]])


@dataclass(frozen=True)
class _Trees:
    """Growing trees of B sequences with at most ``limits`` [B] nodes, and ``levels`` [B] tokens on a path."""

    builder: TreeBuilder
    sampler: SiblingSampler
    source: Source
    settings: SamplingBatch
    noise: Noise
    limits: Tensor
    levels: Tensor

    def open(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Expand ``nodes`` [M] of sequences ``rows`` [M], and return the places [M] of their distributions."""
        places = expanded(self.builder, self.source, self.settings, rows, nodes)[0]
        self.sampler.open(places)
        return places

    def grow_by_chance(self, table: ChanceTable, drawn: Tensor) -> Tensor:
        """Draw one token per sequence at a time, at its most promising place.

        Returns:
            [B, capacity] the drafter's estimate of each node before its draw.
        """
        builder, sampler = self.builder, self.sampler
        # Entry 0 is for the root and entry 1 + i for node i.
        reach = self.limits.new_zeros(len(self.limits), builder.capacity + 1, dtype=torch.float64)
        reach[:, 0] = 1.0  # chance of the path to a node
        depth, rank = torch.zeros_like(reach, dtype=torch.int64), torch.zeros_like(reach, dtype=torch.int64)
        left = reach.clone()  # largest remaining probability after a node
        value = torch.zeros_like(reach)  # chance of the next child
        value[:, 0] = (self.levels > 0).double()
        places = torch.full_like(depth, -1)  # row of q of a node, -1 if there is none
        estimates = torch.zeros_like(reach[:, 1:])

        def update(rows: Tensor, entry: Tensor) -> None:
            """Compute the value of the next children of nodes."""
            place = places[rows, entry]
            left[rows, entry] = sampler.largest(place).double()
            chance = table.chances(drawn[rows], depth[rows, entry], rank[rows, entry], left[rows, entry])
            value[rows, entry] = (reach[rows, entry] * chance).masked_fill(sampler.empty(place), 0.0)

        while len(rows := ((builder.sizes < self.limits) & (value.amax(-1) > 0)).nonzero().squeeze(-1)):
            entry = value[rows].argmax(-1)
            new = (places[rows, entry] < 0).nonzero().squeeze(-1)
            if len(new):
                places[rows[new], entry[new]] = self.open(rows[new], entry[new] - 1)
                update(rows[new], entry[new])
                continue  # another place may have a higher value now
            node = sampler.take(rows, places[rows, entry], entry - 1, self.noise)
            estimates[rows, node] = left[rows, entry]
            reach[rows, node + 1] = value[rows, entry]
            depth[rows, node + 1] = depth[rows, entry] + 1
            first = value[rows, entry] * table.first(drawn[rows], depth[rows, node + 1])
            value[rows, node + 1] = first.masked_fill(depth[rows, node + 1] >= self.levels[rows], 0.0)
            rank[rows, entry] += 1
            update(rows, entry)
        return estimates

    def grow_by_level(self, threshold: float) -> None:
        """Draw all children worth at least ``threshold``, level by level."""
        builder, sampler, limits, levels = self.builder, self.sampler, self.limits, self.levels
        rows = (limits.minimum(levels) > 0).nonzero().squeeze(-1)
        nodes = torch.full_like(rows, ROOT)
        reach = torch.ones(len(rows), dtype=torch.float64, device=limits.device)
        for depth in range(int(levels.max())):
            if not len(rows):
                break
            place, value = self.open(rows, nodes), reach.clone()
            level: list[tuple[Tensor, Tensor, Tensor]] = []
            while True:
                m = ((value >= threshold) & ~sampler.empty(place)).nonzero().squeeze(-1)
                # A sequence draws at its first places, as many as it has room for.
                m = m[builder.sizes[rows[m]] + repeats(rows[m]) < limits[rows[m]]]
                if not len(m):
                    break
                node = sampler.take(rows[m], place[m], nodes[m], self.noise)
                child = reach[m] * sampler.share[rows[m], node]
                value[m] -= child
                level.append((rows[m], node, child))
            if not level:
                break
            rows, nodes, reach = (torch.cat(parts) for parts in zip(*level, strict=True))
            # Expand only nodes that can get a child.
            going = (reach >= threshold) & (builder.sizes[rows] < limits[rows]) & (depth + 1 < levels[rows])
            m = going.nonzero().squeeze(-1)
            rows, nodes, reach = rows[m], nodes[m], reach[m]
