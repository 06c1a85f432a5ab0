"""Chains: one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from osd.runtime.memory import recycled
from osd.speculation.growth.base import Expander, expanded
from osd.speculation.noise import Noise, Purpose
from osd.speculation.sampling import SamplingBatch, most_probable
from osd.speculation.tree import DraftBatch, Draw, TreeBuilder


@dataclass(frozen=True)
class Drawn:
    """The last tokens [M] of chains, as ``columns``, and the ``logits`` [M, Vd] that they were drawn by.

    ``q`` [M, Vd] are their distributions at temperature 1, None where they were drawn by others.
    """

    columns: Tensor
    logits: Tensor
    q: Tensor | None

    def probability(self) -> Tensor:
        """[M] of each token at temperature 1."""
        q = self.q
        if q is None:
            q = torch.softmax(
                self.logits, -1, out=recycled(tuple(self.logits.shape), self.logits.dtype, self.logits.device)
            )
        return q.gather(-1, self.columns[:, None]).squeeze(-1)


GoesOn = Callable[[int, Tensor, Drawn], Tensor]
"""Given how long the chains ``rows`` [M] are now, those rows, and the tokens drawn last, which are kept: [M] bool,
whether to draft on after them."""


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
        goes_on = self._watch(expand, limits)
        rows = (limits > 0).nonzero().squeeze(-1)
        level = 0
        while len(rows):
            nodes = torch.full_like(rows, level - 1)
            places, q, logits = expanded(builder, expand, sampling, rows, nodes)
            columns = most_probable(logits) if sampling.all_greedy else noise.rows(rows).pick(q, Purpose.DRAFT, level)
            builder.extend(rows, level, columns, places)
            level += 1
            room = limits[rows] > level
            if not room.any():
                break
            rows = rows[room & goes_on(level, rows, Drawn(columns, logits, q if sampling.plain else None))]
        return builder.finish(self.draw)

    def _watch(self, expand: Expander, limits: Tensor) -> GoesOn:
        """What decides, for the drafts of one round, whether they go on; called after each level."""
        return lambda level, rows, drawn: torch.ones_like(drawn.columns, dtype=torch.bool)
