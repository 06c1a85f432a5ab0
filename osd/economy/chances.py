"""Share of draft nodes that the target keeps, for growth policies that estimate no chances."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LATELY = 100.0
"""Number of observations that count: older observations, and the first guess, are forgotten."""

UNSEEN_STEPS = 2000
"""Steps after which 1 / e of the evidence is left while nothing is observed.

A drafter that brings nothing is tried again when its evidence has faded so far that the first guess pays. A guess of g
tokens that counts for d observations then costs less than d g tokens in these steps, however expensive a trial is: the
guesses below cost less than 0.5 % of plain decoding.
"""

_FIRST = 0.7
"""First guess of the share of first nodes that are kept, and of further nodes if the node before was kept: drafts that
pay with a good drafter are tried, and no draft that costs as much as plain decoding."""

_DOUBT = 2.0
"""Drafts that this guess counts for: a single unlucky rejection does not end the trials."""


class Fading:
    """Running mean that returns to a first guess while nothing is observed."""

    def __init__(self, doubt: float = 1.0) -> None:
        """Begin with a guess that counts for ``doubt`` observations."""
        self._doubt = doubt
        self._total = self._count = 0.0
        self._moment = 0

    def observe(self, value: float, moment: int) -> None:
        """Add a value that was observed in step ``moment``."""
        left = (1 - 1 / _LATELY) * self._left(moment)
        self._total, self._count, self._moment = left * self._total + value, left * self._count + 1, moment

    def at(self, moment: int, guess: float) -> float:
        """Return the mean as of step ``moment``; ``guess`` is its value without observations."""
        left = self._left(moment)
        doubt = self._doubt * (1 - left * self._count / _LATELY)
        return (left * self._total + doubt * guess) / (left * self._count + doubt)

    def doubt(self) -> None:
        """Reduce the weight of the observations to at most the weight of the guess; their mean stays.

        New observations then outweigh the old ones.
        """
        kept = min(1.0, self._doubt / self._count) if self._count else 1.0
        self._total, self._count = kept * self._total, kept * self._count

    def _left(self, moment: int) -> float:
        return math.exp((self._moment - moment) / UNSEEN_STEPS)


class NodeShares:
    """Share of drafts whose i-th node, in draw order, was on the path that the target kept.

    A smaller draft of a growth policy is the beginning of a larger one. The sum of the shares of the first n nodes is
    therefore the expected gain of a draft of n nodes, for chains and for trees.
    """

    def __init__(self, nodes: int) -> None:
        self._shares = [Fading(_DOUBT) for _ in range(nodes)]
        self._riders = Fading()
        self._steps = 0

    @property
    def riders(self) -> float:
        """Mean number of rows that the drafter adds to a forward for the root and for each node of a draft."""
        return self._riders.at(self._steps, 0.0)

    def chances(self) -> list[float]:
        """Return the chance that each node is kept; called once in each step in which the drafter may draft."""
        self._steps += 1
        chances: list[float] = []
        guess, first = _FIRST, _FIRST
        for share in self._shares:
            chances.append(share.at(self._steps, guess))
            first = chances[0]
            guess = chances[-1] * first
        return chances

    def observe(self, size: int, kept: Sequence[int], riders: int = 0) -> None:
        """Count a draft of ``size`` nodes, its nodes on the ``kept`` path, and the ``riders`` in its forward."""
        self._riders.observe(riders / (1 + size), self._steps)
        for node, share in enumerate(self._shares[:size]):
            share.observe(node in kept, self._steps)

    def renew(self, nodes: int) -> None:
        """Weaken the evidence for drafts of another version or shape, of up to ``nodes`` nodes."""
        for share in self._shares:
            share.doubt()
        self._shares = (self._shares + [Fading(_DOUBT) for _ in range(nodes)])[:nodes]
