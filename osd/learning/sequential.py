"""A test that may be looked at after every pair: is one side better than the other, whenever one stops?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

ERROR = 0.05
"""Chance of ever saying that a side is better that is not, over all looks."""

_BETS = np.array([0.05, 0.1, 0.2, 0.4, 0.8])


class PairedTest:
    """Bets on the differences of pairs, each between -1 and 1, one gambler for either side.

    Where the first side is no better the differences have a mean of 0 at most, whatever came before, and the wealth
    of who bets a share b on each, ``prod(1 + b d)``, is expected never to grow. So does the mean wealth of several b,
    which is an e-value: by Ville's inequality it ever reaches 1 / 0.05 with a chance of at most 0.05.

    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024 (arXiv 2010.09686).
    """

    def __init__(self) -> None:
        self._wealth = np.zeros((2, len(_BETS)))  # logarithms

    def add(self, differences: Iterable[float]) -> None:
        """Take in pairs: the first side's value less the second's."""
        for difference in differences:
            self._wealth += np.log1p(np.outer([difference, -difference], _BETS))

    @property
    def better(self) -> Literal["first", "second"] | None:
        """Which side is better, None while that is not clear; figures that are no numbers make nothing clear."""
        evidence = np.exp(self._wealth).mean(1)
        if evidence[0] >= 1 / ERROR:
            return "first"
        return "second" if evidence[1] >= 1 / ERROR else None
