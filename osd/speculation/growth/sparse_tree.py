"""Trees of the paths that were right most often."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from osd.speculation.growth.acceptance_table import AcceptanceTable
from osd.speculation.growth.static_tree import StaticTree
from osd.speculation.growth.tree_shape import best_paths, hardware_aware_size, shape_of_paths
from osd.speculation.tree import Draw


class SparseTree(StaticTree):
    """Fill the paths of child ranks that were accepted most often, as many as pay on this machine.

    Unlike Sequoia's shape, a candidate's chance depends on its depth as well as on its rank, which suits drafters that
    are worse the further they look. The candidates are the drafter's most probable tokens unless ``draw`` says else.

    The sparse tree of Chen et al., "Hardware-aware parallel prompt decoding", 2024 (arXiv 2405.18628); its prompt
    tokens, and trees that alternate with their number, need the drafter of that paper.
    """

    name: ClassVar[str] = "sparse_tree"

    def __init__(
        self,
        ranks: Sequence[Sequence[float]],
        budget: int = 16,
        draw: Draw | str = Draw.DETERMINISTIC,
        seconds: Mapping[int, float] | None = None,
    ) -> None:
        """Choose the paths.

        Args:
            ranks: how often the candidate of each rank is right, by depth and then by rank.
            budget: draft tokens at most.
            draw: how siblings are drawn.
            seconds: measured forwards of the target by their rows; the tree then has as many nodes, from 1 to
                ``budget``, as give the most tokens per second.
        """
        if budget < 1 or not ranks or not all(ranks):
            raise ValueError("sparse_tree needs at least one node, and the share of one rank at each depth")
        if not all(0 <= share <= 1 for level in ranks for share in level):
            raise ValueError("sparse_tree needs shares between 0 and 1")
        self._draw_siblings(draw)
        self._shape = ()
        self._follow(ranks, budget, seconds)

    def _best(self, table: AcceptanceTable, seconds: Mapping[int, float] | None) -> tuple[int, ...]:
        paths = best_paths(table.by_depth(), self._budget)
        if seconds is not None:
            tokens = list(itertools.accumulate((share for _, share in paths), initial=1.0))
            paths = paths[: max(1, hardware_aware_size(tokens, seconds))]
        return shape_of_paths([path for path, _ in paths])
