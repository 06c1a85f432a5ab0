"""What training takes from the rounds beside it, measured: forwards while it computes against those while it rests."""

from __future__ import annotations

import math
from collections.abc import Iterable

from osd.registry.replica_loads import ReplicaLoad

_SPAN = 0.2  # seconds of an observation at least: replicas report every tenth of one
_MEMORY = 120.0  # seconds of forwards after which 1 / e of what was seen is left
_DOUBT = 0.5  # seconds of forwards, half of them beside training, that say it takes nothing


class Slowing:
    """A running straight line through observations: how much longer forwards take than at rest, by how much trains.

    One observation is what passes between two looks: seconds of the replicas' forwards, the seconds of the same at
    rest, and how many cores trained meanwhile. Whatever slows forwards always, such as longer contexts, is
    in the line's beginning and not in its slope. The slope times what was trained is what the replicas lost.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float, float, float] | None = None
        self._sums = [0.0] * 5  # of weights, share, ratio, share ratio, share share
        self._lost = self._trained = 0.0

    @property
    def slope(self) -> float:
        """Seconds of forwards lost in each second of them at rest, for each core that trains beside it."""
        weight, share, ratio, both, square = self._sums
        if not weight:
            return 0.0
        spread = square - share**2 / weight
        return max((both - share * ratio / weight) / (spread + _DOUBT / 4), 0.0)

    @property
    def per_second(self) -> float:
        """Seconds of the engine lost by each CPU second of training beside requests, lately."""
        return self._lost / self._trained if self._trained else self.slope

    def observe(self, loads: Iterable[ReplicaLoad], trained: float, now: float) -> float:
        """Take a look at ``now``, when training has computed ``trained`` CPU seconds; the engines' seconds lost."""
        forwards, rest = 0.0, 0.0
        for load in loads:
            forwards, rest = forwards + load.forward_seconds, rest + load.rest_seconds
        last = self._last
        if last is not None and now - last[0] < _SPAN:
            return 0.0
        self._last = (now, forwards, rest, trained)
        if last is None:
            return 0.0
        passed, forwards, rest, trained = (new - old for new, old in zip(self._last, last, strict=True))
        if rest <= 0 or forwards <= 0 or trained < 0:  # nothing ran, or a replica came or went
            return 0.0
        share = trained / passed
        lost = rest * share * self.slope
        kept = math.exp(-rest / _MEMORY)
        seen = (1.0, share, forwards / rest, share * forwards / rest, share**2)
        self._sums = [kept * known + rest * new for known, new in zip(self._sums, seen, strict=True)]
        self._lost, self._trained = kept * self._lost + lost, kept * self._trained + trained
        return lost
