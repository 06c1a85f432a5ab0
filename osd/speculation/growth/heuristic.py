"""Chains whose length follows what was accepted."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.speculation.growth.chain import Chain


class Heuristic(Chain):
    """Draft two tokens more after a round that accepted all, one fewer after any other.

    The policy has no memory: whoever runs the rounds keeps each sequence's depth, starts it at ``start``, passes it
    as a limit and moves it with ``adapt``. Lossless, for a depth depends on past rounds only. The "heuristic"
    schedule of transformers' assisted generation.
    """

    name: ClassVar[str] = "heuristic"

    def __init__(self, start: int, depth: int) -> None:
        """Begin with ``start`` tokens and never draft more than ``depth``."""
        super().__init__(depth)
        if not 1 <= start <= depth:
            raise ValueError(f"start must be between 1 and depth {depth}, not {start}")
        self.start = start

    def adapt(self, depths: Tensor, drafted: Tensor, accepted: Tensor) -> Tensor:
        """The depths [B] of the next round from those of this one and what came of them, all [B] int64.

        A round that drafted nothing changes nothing.
        """
        moved = torch.where(accepted == drafted, depths + 2, depths - 1).clamp(1, self.max_nodes)
        return torch.where(drafted > 0, moved, depths)
