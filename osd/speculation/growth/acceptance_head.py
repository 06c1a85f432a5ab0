"""Chains that end when a trained head expects a rejection."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from osd.speculation.growth.base import Expander
from osd.speculation.growth.chain import Chain, Drawn, GoesOn


class AcceptanceHead(Chain):
    """Stop when the probability that a token drafted so far is rejected is above ``h``.

    A head on the drafter's state says, of each token that the drafter has read, how probably it is accepted; their
    product is the probability of no rejection. The token drawn last has not been read yet: it does not count, and it
    is kept. So only the next draw is decided, by tokens that were drawn before and stay, which is lossless whatever
    the head says.

    Huang, Guo and Wang, "SpecDec++: boosting speculative decoding via adaptive candidate lengths", COLM 2025 (arXiv
    2405.19715). The head is ``osd.drafters.acceptance_head``.
    """

    name: ClassVar[str] = "acceptance_head"
    stops_below: float | None = None

    def __init__(self, h: float, depth: int) -> None:
        """Stop above probability ``h`` in [0, 1], and after ``depth`` tokens."""
        super().__init__(depth)
        if not 0 <= h <= 1:
            raise ValueError(f"h must be between 0 and 1, not {h}")
        self.h = h

    def _watch(self, expand: Expander, limits: Tensor) -> GoesOn:
        unbroken = torch.ones(len(limits), dtype=torch.float64, device=limits.device)  # [B]

        def goes_on(level: int, rows: Tensor, drawn: Drawn) -> Tensor:
            if level > 1:  # before that the drafter has read committed tokens only
                unbroken[rows] *= expand.acceptance().double()
            return 1 - unbroken[rows] <= self.h

        return goes_on
