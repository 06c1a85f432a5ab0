"""Trees that grow where the drafter is most likely to be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from osd.speculation.growth.base import Expander, Growth, expanded
from osd.speculation.growth.sibling_sampler import SiblingSampler
from osd.speculation.noise import Noise
from osd.speculation.sampling import SamplingBatch
from osd.speculation.tree import ROOT, DraftBatch, Draw, TreeBuilder, repeats


class DynamicTree(Growth):
    """Spend each next token where it is most likely to be accepted, judged by the drafter's own probabilities.

    The next child of a node is worth the probability of the path to the node times the mass that its earlier children
    have left. With a budget alone, the most valuable place gets the next draw, until the budget is spent; the drafter
    is asked about a node only when its first child is due. With a ``threshold``, a whole level is expanded in one
    forward and every place worth the threshold or more is drawn, so that there are as many forwards as levels. Either
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

    def grow(self, expand: Expander, sampling: SamplingBatch, noise: Noise, limits: Tensor) -> DraftBatch:
        """See ``Growth.grow``."""
        limits = limits.clamp(max=self.max_nodes)
        builder = TreeBuilder(len(limits), int(limits.max()), expand.support, limits.device)
        sampler = SiblingSampler(builder, Draw.WITHOUT_REPLACEMENT, sampling.temperature == 0)
        settings = sampling.for_trees()

        def opened(rows: Tensor, nodes: Tensor) -> Tensor:
            places = expanded(builder, expand, settings, rows, nodes)[0]
            sampler.open(places)
            return places

        if self.threshold is None:
            _by_value(builder, sampler, opened, noise, limits)
        else:
            _by_level(builder, sampler, opened, noise, limits, self.threshold)
        return sampler.finish()


Opener = Callable[[Tensor, Tensor], Tensor]
"""Asks the drafter about nodes of sequences, both [M], and returns the places of their distributions."""


def _by_value(builder: TreeBuilder, sampler: SiblingSampler, opened: Opener, noise: Noise, limits: Tensor) -> None:
    """Draw at the most valuable place of each sequence, one token of every sequence at a time."""
    # Entry 0 is about the root and entry 1 + i about node i.
    reach = torch.zeros(len(limits), builder.capacity + 1, dtype=torch.float64, device=limits.device)
    reach[:, 0] = 1.0  # the drafter's probability of the path to a node
    value = reach.clone()  # of the next child
    kept = torch.full_like(builder.sizes[:, None].expand_as(value), -1)  # a node's row of q, -1 if none
    while len(rows := ((builder.sizes < limits) & (value.amax(-1) > 0)).nonzero().squeeze(-1)):
        entry = value[rows].argmax(-1)
        new = (kept[rows, entry] < 0).nonzero().squeeze(-1)
        if len(new):
            kept[rows[new], entry[new]] = opened(rows[new], entry[new] - 1)
        place = kept[rows, entry]
        node = sampler.take(rows, place, entry - 1, noise)
        share = sampler.share[rows, node]
        reach[rows, node + 1] = value[rows, node + 1] = reach[rows, entry] * share
        rest = (value[rows, entry] - reach[rows, entry] * share).clamp(min=1e-300)  # rounding must not close a full row
        value[rows, entry] = rest.masked_fill(sampler.empty(place), 0.0)


def _by_level(
    builder: TreeBuilder, sampler: SiblingSampler, opened: Opener, noise: Noise, limits: Tensor, threshold: float
) -> None:
    """Draw all children that are worth the threshold, level by level."""
    rows = (limits > 0).nonzero().squeeze(-1)
    nodes = torch.full_like(rows, ROOT)
    reach = torch.ones(len(rows), dtype=torch.float64, device=limits.device)
    while len(rows):
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
        m = ((reach >= threshold) & (builder.sizes[rows] < limits[rows])).nonzero().squeeze(-1)
        rows, nodes, reach = rows[m], nodes[m], reach[m]
