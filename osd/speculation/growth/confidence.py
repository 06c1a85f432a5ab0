"""Chains that end when the drafter doubts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from osd.speculation.growth.base import Expander
from osd.speculation.growth.chain import Chain, GoesOn


class Confidence(Chain):
    """Stop after the first token whose own probability, at temperature 1, is below ``eta``; that token is kept.

    Dropping it would bias the output; stopping after it does not. The second exit of Kangaroo (Liu et al., NeurIPS
    2024) and the dynamic lookahead of transformers (Mamou et al., 2024, arXiv 2405.04304).
    """

    name: ClassVar[str] = "confidence"

    def __init__(self, eta: float, depth: int) -> None:
        """Stop below probability ``eta`` in [0, 1], and after ``depth`` tokens."""
        super().__init__(depth)
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must be between 0 and 1, not {eta}")
        self.eta = self.stops_below = eta

    def _watch(self, expand: Expander, limits: Tensor) -> GoesOn:
        return lambda level, rows, drawn: drawn.probability() >= self.eta
