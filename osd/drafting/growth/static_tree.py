"""Trees of a fixed shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from osd.drafting.growth.acceptance_table import AcceptanceTable
from osd.drafting.growth.base import DraftBudget, DraftOutcome, Growth, SecondsByShare, Source, expanded, reaches
from osd.drafting.growth.sibling_sampler import SiblingSampler
from osd.drafting.growth.tree_shape import (
    best_shape,
    expected_tokens,
    hardware_aware_size,
    paths_of_shape,
    shape_of_paths,
)
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder

_STEP = 0.1  # weight of a step in the running mean of the number of sequences


class StaticTree(Growth):
    """Tree of a given shape, filled level by level with one forward of the drafter for each level.

    The shape is Sequoia's for measured acceptance by child rank (Chen et al., NeurIPS 2024), or a list of paths as in
    Medusa (Cai et al., ICML 2024). A node with too few tokens in its distribution gets fewer children.

    A computed shape follows the counts in ``table``: ``reshape`` replaces it between two steps. The shape of a step
    depends on earlier steps only and on no token of its own draws, so each step is lossless.
    """

    name: ClassVar[str] = "static_tree"
    fixed_width = True

    def __init__(
        self,
        paths: Sequence[Sequence[int]] | None = None,
        draw: Draw | str = Draw.WITHOUT_REPLACEMENT,
        acceptance: Sequence[float] | None = None,
        budget: int = 16,
        depth: int = 8,
        seconds: Mapping[int, float] | None = None,
    ) -> None:
        """Choose a shape, and the ``draw`` of siblings.

        The shape consists of ``paths`` of child ranks, or is the best one for the ``acceptance`` of each rank, with at
        most ``budget`` nodes and ``depth`` levels. ``seconds`` are those of a forward of the target by its rows; with
        them the shape has the size with the most tokens per second.
        """
        if (paths is None) == (acceptance is None):
            raise ValueError("static_tree needs either paths or acceptance")
        if acceptance is not None and (not len(acceptance) or budget < 1 or depth < 1):
            raise ValueError("static_tree needs at least one acceptance, node and level")
        if seconds is not None and acceptance is None:
            raise ValueError("static_tree needs acceptance to choose a size by seconds")
        self.table: AcceptanceTable | None = None
        self._draw_siblings(draw)
        self._shape: tuple[int, ...] = ()
        if acceptance is not None:
            self._follow([acceptance] * depth, budget, seconds)
        else:
            self._take(shape_of_paths(paths or ()))
            self.chains = len(set(self._shape)) == len(self._shape)

    def _draw_siblings(self, draw: Draw | str) -> None:
        self._draw = Draw(draw)
        self.draws = frozenset({self._draw})

    def _follow(self, prior: Sequence[Sequence[float]], budget: int, seconds: Mapping[int, float] | None) -> None:
        """Use the best shape of at most ``budget`` nodes for a ``prior``, and start to count acceptance."""
        self.table, self._budget = AcceptanceTable(prior), budget
        self._together: float | None = None
        self.chains = all(len(level) == 1 for level in prior)  # of every later shape
        self.reshape(seconds)

    def observe(self, drafts: Sequence[DraftOutcome], seconds: SecondsByShare) -> bool:
        if self.table is None:
            return False
        before = len(drafts) if self._together is None else self._together
        self._together = before + _STEP * (len(drafts) - before)
        for draft in drafts:
            self.table.observe(draft.parents, draft.path)
        return self.table.due() and self.reshape(seconds(self._together))

    def forget(self) -> None:
        if self.table is not None:
            self.table.forget()

    def reshape(self, seconds: Mapping[int, float] | None) -> bool:
        """Use the best shape for the ``table``, and return whether it differs; shapes of ``paths`` do not change.

        ``seconds`` are as in the constructor; None for the size of the budget.
        """
        return self.table is not None and self._take(self._best(self.table, seconds))

    def _best(self, table: AcceptanceTable, seconds: Mapping[int, float] | None) -> tuple[int, ...]:
        acceptance, depth, budget = table.by_rank(), len(table.by_depth()), self._budget
        if seconds is not None:
            budget = max(1, hardware_aware_size(expected_tokens(acceptance, budget, depth), seconds))
        return best_shape(acceptance, budget, depth)[0]

    def _take(self, shape: tuple[int, ...]) -> bool:
        if not shape:
            raise ValueError("static_tree needs at least one path")
        if shape == self._shape:
            return False
        self._shape, self._levels = shape, _levels(shape)
        self.max_nodes = len(shape)
        return True

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Child ranks from the root to each node of the current shape."""
        return paths_of_shape(self._shape)

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        """Return trees of the current shape, see ``Growth.grow``; a limit keeps the first nodes, level by level."""
        limits, device = budget.limits, budget.limits.device
        builder = TreeBuilder(len(limits), self.max_nodes, source.support, device)
        sampler, settings = SiblingSampler(builder, self._draw, sampling.temperature == 0), sampling.for_trees()
        # [B, 1 + shape] node at each place of the shape, the root first; -2 for none
        standing = torch.full((len(limits), 1 + len(self._shape)), -2, device=device)
        standing[:, 0] = ROOT
        allowed = pad(self._allowed(source, limits), (0, 1))  # [B, shape + 1], False for place -1
        reach = reaches(source, limits, len(self._levels))
        for level, (parents, children) in enumerate(self._levels[: int(reach.max())]):
            # [K] places with children, [K, ranks] places of their children, -1 after the last
            above, below = torch.tensor(parents, device=device), torch.tensor(children, device=device)
            open_ = (standing[:, above + 1] > -2) & allowed[:, below[:, 0]] & (reach > level)[:, None]
            rows, which = open_.nonzero(as_tuple=True)
            if not len(rows):
                break
            nodes, wanted = standing[rows, above[which] + 1], below[which]
            places = expanded(builder, source, settings, rows, nodes)[0]
            sampler.open(places)
            width = allowed[rows[:, None], wanted].sum(-1)
            for rank in range(int(width.max())):
                left = sampler.left(places)
                m = ((width > rank) & (left > 0)).nonzero().squeeze(-1)
                # The only token left in a row counts as drawn, with probability 1.
                best = (width[m] - 1 > rank) & (left[m] > 1) if self._draw is Draw.TOP_THEN_DRAWN else None
                standing[rows[m], wanted[m, rank] + 1] = sampler.take(rows[m], places[m], nodes[m], noise, best)
        return sampler.finish()

    def _allowed(self, source: Source, limits: Tensor) -> Tensor:
        """Return [B, shape] bool, the places to fill; with a place also its parent and its earlier siblings."""
        return torch.arange(len(self._shape), device=limits.device) < limits[:, None]


def _levels(shape: tuple[int, ...]) -> list[tuple[list[int], list[list[int]]]]:
    """Return, for each level, the places with children and their children's places, padded with -1."""
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(shape):
        children.setdefault(parent, []).append(place)
    levels, level = [], [ROOT]
    while level := [place for place in level if place in children]:
        width = max(len(children[place]) for place in level)
        levels.append((level, [children[place] + [-1] * (width - len(children[place])) for place in level]))
        level = [child for place in level for child in children[place]]
    return levels
