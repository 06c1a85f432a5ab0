"""Trees that a drafter grows in one call, as large as pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from osd.economy.plan import StepBudget


@dataclass(frozen=True)
class PayingTrees:
    """Trees to be grown level by level, as growth ``best_first`` grows them, of sequences that are drawn alike.

    Attributes:
        room: the nodes that each sequence may have; the roots of those with any are asked about.
        levels: of the deepest trees.
        children: of a node that are looked at.
        chances: [depths, ranks, buckets] float64 that a candidate is kept if its parent is.
        firsts: [depths] the same of first children whose estimates are not known yet.
        edges: [buckets - 1] of the drafter's estimates, between two buckets.
        step: budget of the step.
    """

    room: Sequence[int]
    levels: int
    children: int
    chances: Tensor
    firsts: Tensor
    edges: Tensor
    step: StepBudget
