"""Trees that grow where the drafter is most likely to be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from osd.drafting.growth.base import Budget, Source, expanded, reaches
from osd.drafting.growth.chance_table import ChanceTable, CountingGrowth
from osd.drafting.growth.sibling_sampler import SiblingSampler
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder, repeats


class DynamicTree(CountingGrowth):
    """Spend each next token where it is most likely to be accepted.

    With a budget alone, the place with the highest chance gets the next draw, until the budget is spent; the drafter is
    asked about a node only when its first child is due. The chance of a place is that of the path to it times what was
    counted of such children before: of their depth, their rank among siblings, and the largest probability that the
    drafter gives to a token that is left. With a ``threshold``, a whole level is expanded in one forward and each place
    worth the threshold or more is drawn, so that there are as many forwards as levels; the next child of a node is then
    worth the drafter's probability of the path to the node times the mass that its earlier children have left. Either
    way a value is known before its token is drawn, and no drawn token is dropped, which keeps the draft lossless.

    Xiong et al., "DySpec: faster speculative decoding with dynamic token tree structure", WWW 2025, algorithms 1 and 2.
    """

    name: ClassVar[str] = "dynamic_tree"
    draws = frozenset({Draw.WITHOUT_REPLACEMENT})

    def __init__(self, budget: int, threshold: float | None = None) -> None:
        """Draft at most ``budget`` tokens, and with ``threshold`` only places that are worth so much."""
        if budget < 1:
            raise ValueError(f"budget must be at least 1, not {budget}")
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
        self.max_nodes = budget
        self.threshold = threshold
        super().__init__()

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: Budget) -> DraftBatch:
        limits = budget.limits.clamp(max=self.max_nodes)
        builder = TreeBuilder(len(limits), int(limits.max()), source.support, limits.device)
        sampler = SiblingSampler(builder, Draw.WITHOUT_REPLACEMENT, sampling.temperature == 0)
        settings, levels = sampling.for_trees(), reaches(source, limits, builder.capacity)

        def opened(rows: Tensor, nodes: Tensor) -> Tensor:
            places = expanded(builder, source, settings, rows, nodes)[0]
            sampler.open(places)
            return places

        if self.threshold is not None:
            _by_level(builder, sampler, opened, noise, limits, self.threshold, levels)
            return sampler.finish()
        estimates = _by_chance(builder, sampler, opened, noise, limits, self.table, sampling.temperature > 0, levels)
        draft = sampler.finish()
        return replace(draft, estimates=estimates[:, : draft.tokens.shape[1]])


Opener = Callable[[Tensor, Tensor], Tensor]
"""Asks the drafter about nodes of sequences, both [M], and returns the places of their distributions."""


def _by_chance(
    builder: TreeBuilder,
    sampler: SiblingSampler,
    opened: Opener,
    noise: Noise,
    limits: Tensor,
    table: ChanceTable,
    drawn: Tensor,
    levels: Tensor,
) -> Tensor:
    """Draw at the most promising place of each sequence, one token of every sequence at a time.

    No path gets more tokens than its sequence's ``levels`` [B].

    Returns:
        [B, capacity] the drafter's estimate of each node before it was drawn.
    """
    # Entry 0 is about the root and entry 1 + i about node i.
    reach = torch.zeros(len(limits), builder.capacity + 1, dtype=torch.float64, device=limits.device)
    reach[:, 0] = 1.0  # the chance of the path to a node
    depth, rank = torch.zeros_like(reach, dtype=torch.int64), torch.zeros_like(reach, dtype=torch.int64)
    left = reach.clone()  # the largest probability that is left after a node
    value = torch.zeros_like(reach)  # the chance of the next child
    value[:, 0] = (levels > 0).double()
    kept = torch.full_like(depth, -1)  # a node's row of q, -1 if none
    estimates = torch.zeros(limits.shape[0], builder.capacity, dtype=torch.float64, device=limits.device)

    def look(rows: Tensor, entry: Tensor) -> None:
        """Find out what the next children of nodes are worth."""
        place = kept[rows, entry]
        left[rows, entry] = sampler.largest(place).double()
        chance = table.chances(drawn[rows], depth[rows, entry], rank[rows, entry], left[rows, entry])
        value[rows, entry] = (reach[rows, entry] * chance).masked_fill(sampler.empty(place), 0.0)

    while len(rows := ((builder.sizes < limits) & (value.amax(-1) > 0)).nonzero().squeeze(-1)):
        entry = value[rows].argmax(-1)
        new = (kept[rows, entry] < 0).nonzero().squeeze(-1)
        if len(new):
            kept[rows[new], entry[new]] = opened(rows[new], entry[new] - 1)
            look(rows[new], entry[new])
            continue  # another place may be worth more, now that these are known
        node = sampler.take(rows, kept[rows, entry], entry - 1, noise)
        estimates[rows, node] = left[rows, entry]
        reach[rows, node + 1] = value[rows, entry]
        depth[rows, node + 1] = depth[rows, entry] + 1
        first = table.first(drawn[rows], depth[rows, node + 1])
        value[rows, node + 1] = (value[rows, entry] * first).masked_fill(depth[rows, node + 1] >= levels[rows], 0.0)
        rank[rows, entry] += 1
        look(rows, entry)
    return estimates


def _by_level(
    builder: TreeBuilder,
    sampler: SiblingSampler,
    opened: Opener,
    noise: Noise,
    limits: Tensor,
    threshold: float,
    levels: Tensor,
) -> None:
    """Draw all children that are worth the threshold, level by level, of each sequence at most its ``levels`` [B]."""
    rows = (limits.minimum(levels) > 0).nonzero().squeeze(-1)
    nodes = torch.full_like(rows, ROOT)
    reach = torch.ones(len(rows), dtype=torch.float64, device=limits.device)
    for depth in range(int(levels.max())):
        if not len(rows):
            break
        place, value = opened(rows, nodes), reach.clone()
        level: list[tuple[Tensor, Tensor, Tensor]] = []
        while True:
            m = ((value >= threshold) & ~sampler.empty(place)).nonzero().squeeze(-1)
            # Of one sequence's places as many draw as it has room for, the first ones first.
            m = m[builder.sizes[rows[m]] + repeats(rows[m]) < limits[rows[m]]]
            if not len(m):
                break
            node = sampler.take(rows[m], place[m], nodes[m], noise)
            child = reach[m] * sampler.share[rows[m], node]
            value[m] -= child
            level.append((rows[m], node, child))
        if not level:
            break
        rows, nodes, reach = (torch.cat(parts) for parts in zip(*level, strict=True))
        # A level is worth a forward only where a child could be drawn.
        going = (reach >= threshold) & (builder.sizes[rows] < limits[rows]) & (depth + 1 < levels[rows])
        m = going.nonzero().squeeze(-1)
        rows, nodes, reach = rows[m], nodes[m], reach[m]
