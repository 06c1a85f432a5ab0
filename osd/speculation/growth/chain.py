"""Chains: one token after the other."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.speculation.growth.base import Expander, expanded
from osd.speculation.noise import Noise, Purpose
from osd.speculation.sampling import SamplingBatch, most_probable
from osd.speculation.tree import DraftBatch, Draw, TreeBuilder


class Chain:
    """Draw ``depth`` tokens one after the other.

    Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023.
    """

    name: ClassVar[str] = "chain"
    draw = Draw.IID
    chains = True
    fixed_width = True
    stops_below: float | None = 0.0

    def __init__(self, depth: int) -> None:
        """Draw at most ``depth`` tokens, at least 1."""
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.max_nodes = depth

    def grow(self, expand: Expander, sampling: SamplingBatch, noise: Noise, limits: Tensor) -> DraftBatch:
        """See ``Growth.grow``; asks the drafter once per level."""
        limits = limits.clamp(max=self.max_nodes)
        builder = TreeBuilder(len(limits), int(limits.max()), expand.support, limits.device)
        rows = (limits > 0).nonzero().squeeze(-1)
        level = 0
        while len(rows):
            nodes = torch.full_like(rows, level - 1)
            places, q, logits = expanded(builder, expand, sampling, rows, nodes)
            columns = most_probable(logits) if sampling.all_greedy else noise.rows(rows).pick(q, Purpose.DRAFT, level)
            builder.extend(rows, level, columns, places)
            level += 1
            rows = rows[self._goes_on(logits, columns) & (limits[rows] > level)]
        return builder.finish(self.draw)

    def _goes_on(self, logits: Tensor, columns: Tensor) -> Tensor:
        """[M] bool, whether to draft on after tokens ``columns`` [M], drawn by ``logits`` [M, Vd] and kept."""
        return torch.ones_like(columns, dtype=torch.bool)
