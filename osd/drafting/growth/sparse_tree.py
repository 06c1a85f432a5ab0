"""Trees of the paths that were accepted most often."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from osd.drafting.growth.acceptance_table import AcceptanceTable
from osd.drafting.growth.base import DraftBudget, Source
from osd.drafting.growth.prompt_rows import RiderPlan, best_plan
from osd.drafting.growth.static_tree import StaticTree
from osd.drafting.growth.tree_shape import best_paths, hardware_aware_size, paths_of_shape, shape_of_paths
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import DraftBatch, Draw


class SparseTree(StaticTree):
    """Tree of the paths of child ranks that were accepted most often, sized by the speed of the machine.

    Unlike in Sequoia's shape, a candidate's chance depends on its depth as well as on its rank, which suits drafters
    that become worse with depth. By default the candidates are the drafter's most probable tokens.

    This is the sparse tree of Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration
    of LLM inference", Findings of EMNLP 2025 (arXiv 2405.18628). For a drafter with riders there is a tree for each
    depth of the drafter, with the long-run best number of riders; see ``osd.drafting.growth.prompt_rows``.
    """

    name: ClassVar[str] = "sparse_tree"

    def __init__(
        self,
        ranks: Sequence[Sequence[float]],
        budget: int = 16,
        draw: Draw | str = Draw.DETERMINISTIC,
        seconds: Mapping[int, float] | None = None,
    ) -> None:
        """Choose at most ``budget`` paths; see ``StaticTree`` for ``draw`` and ``seconds``.

        ``ranks`` are the prior probabilities that the target accepts a candidate, by depth and then by rank.
        """
        if budget < 1 or not ranks or not all(ranks):
            raise ValueError("sparse_tree needs at least one node, and one rank at each depth")
        if not all(0 <= share <= 1 for level in ranks for share in level):
            raise ValueError("sparse_tree needs probabilities between 0 and 1")
        self._draw_siblings(draw)
        self._shape = ()
        self._riding: tuple[int, int] | None = None  # levels of a drafter with riders, and rows per rider
        self.plan: RiderPlan | None = None
        self._follow(ranks, budget, seconds)

    def reshape(self, seconds: Mapping[int, float] | None) -> bool:
        """Use the best trees for the table, joined in one shape, and return whether they differ."""
        assert self.table is not None  # noqa: S101  the constructor makes it
        self._seconds = seconds
        drafts = [self._best_paths(self.table, seconds)]
        if self._riding is not None:
            self.plan = best_plan(self.table.by_depth(), self._budget, *self._riding, seconds)
            drafts += [state.paths for state in self.plan.states]
        shape = shape_of_paths({path for draft in drafts for path in draft})
        place = {path: number for number, path in enumerate(paths_of_shape(shape))}
        before = None if self._shape == () else self._parts
        self._parts = torch.zeros(len(drafts), len(shape), dtype=torch.bool)  # [1 + states, shape]
        for part, draft in zip(self._parts, drafts, strict=True):
            part[[place[path] for path in draft]] = True
        changed = self._take(shape)
        self.max_nodes = max(map(len, drafts))
        return changed or before is None or not torch.equal(before, self._parts)

    def rider_rows(self, depth: int) -> int | None:
        if self.plan is None or self._riding is None:
            return None
        return self.plan.states[min(depth, self._riding[0])].prompt_tokens * self._riding[1]

    def _allowed(self, source: Source, limits: Tensor) -> Tensor:
        """Return [B, shape] bool, the places in the tree of each sequence's state, up to its limit."""
        reach, levels = source.reach, source.levels
        if reach is None or levels is None:
            chosen = self._parts[:1].expand(len(limits), -1)
        else:
            chosen = self._parts[[1 + tokens for tokens in reach.tokens]]
        chosen = chosen.to(limits.device)
        return chosen & (chosen.cumsum(-1) <= limits[:, None])

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        if source.reach is not None and source.levels is not None:
            riding = source.levels, source.reach.rows
            if riding != self._riding:
                self._riding = riding
                self.reshape(self._seconds)
        return super().grow(source, sampling, noise, budget)

    def _best_paths(self, table: AcceptanceTable, seconds: Mapping[int, float] | None) -> list[tuple[int, ...]]:
        paths = best_paths(table.by_depth(), self._budget)
        if seconds is not None:
            tokens = list(itertools.accumulate((share for _, share in paths), initial=1.0))
            paths = paths[: max(1, hardware_aware_size(tokens, seconds))]
        return [path for path, _ in paths]
