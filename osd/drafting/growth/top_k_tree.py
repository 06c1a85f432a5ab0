"""Trees of the most probable paths."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.drafting.growth.base import DraftBudget, Growth, Source, check_positive, expanded, reaches
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder, repeats


class TopKTree(Growth):
    """Tree of the drafter's most probable paths; nothing is drawn.

    At each level the ``top_k`` most probable candidates become nodes, and each is expanded into ``top_k`` candidates.
    At the end the most probable remaining candidates fill the budget. EAGLE-2 may drop expanded nodes at the end; here
    they stay.

    Li et al., "EAGLE-2: faster inference of language models with dynamic draft trees", EMNLP 2024.
    """

    name: ClassVar[str] = "top_k_tree"
    draws = frozenset({Draw.DETERMINISTIC})
    fixed_width = True

    def __init__(self, budget: int, top_k: int = 4, depth: int = 5) -> None:
        """Draft at most ``budget`` tokens, ``top_k`` per level, in paths of at most ``depth`` tokens."""
        check_positive(budget=budget, top_k=top_k, depth=depth)
        self.max_nodes, self.top_k, self.depth = budget, top_k, depth

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        limits = budget.limits.clamp(max=self.max_nodes)
        batch, device, settings = len(limits), limits.device, sampling.for_trees()
        builder = TreeBuilder(batch, int(limits.max()), source.support, device)
        reach = reaches(source, limits, self.depth)
        rows = (limits.minimum(reach) > 0).nonzero().squeeze(-1)
        nodes = torch.full_like(rows, ROOT)
        score = torch.zeros(len(rows), dtype=torch.float64, device=device)
        pool: list[tuple[Tensor, ...]] = []  # rejected candidates: rows, parents, columns, places, scores
        for level in range(int(reach.max())):
            if not len(rows):
                break
            places, q, _ = expanded(builder, source, settings, rows, nodes)
            best = q.topk(min(self.top_k, q.shape[-1]))
            width = best.indices.shape[-1]
            candidates = (
                rows.repeat_interleave(width),
                nodes.repeat_interleave(width),
                best.indices.flatten(),
                places.repeat_interleave(width),
                (score[:, None] + best.values.double().log()).flatten(),
            )
            room = (limits - builder.sizes).clamp(max=self.top_k)
            is_best = _best(candidates[0], candidates[-1], room)
            chosen, left = (mask.nonzero().squeeze(-1) for mask in (is_best, ~is_best))
            pool.append(tuple(part[left] for part in candidates))
            rows, parents, columns, places, score = (part[chosen] for part in candidates)
            nodes = builder.add(rows, parents, columns, places)
            going = ((builder.sizes[rows] < limits[rows]) & (level + 1 < reach[rows])).nonzero().squeeze(-1)
            rows, nodes, score = rows[going], nodes[going], score[going]
        if pool:
            rows, parents, columns, places, score = (torch.cat(parts) for parts in zip(*pool, strict=True))
            rest = _best(rows, score, limits - builder.sizes).nonzero().squeeze(-1)
            builder.add(rows[rest], parents[rest], columns[rest], places[rest])
        return builder.finish(Draw.DETERMINISTIC)


def _best(rows: Tensor, scores: Tensor, room: Tensor) -> Tensor:
    """Return whether [M] a candidate is among the ``room`` [B] highest finite scores of its sequence."""
    order = scores.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).index_copy_(0, order, repeats(rows[order]))
    return (rank < room[rows]) & torch.isfinite(scores)
