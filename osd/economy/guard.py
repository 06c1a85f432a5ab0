"""Loss budget: drafting may lose a small share of the time, and is switched off when that is spent.

A drafter has a bucket of seconds. A share of the busy seconds and measured gains fill it, measured losses drain it, and
it overflows, so old gains do not pay for later losses. Drafting is off while the bucket is empty. Half of the
refill pays for probes, short blocks with drafting. Drafting returns when the bucket is half full and the probes gained
with certainty. The measured loss never exceeds that share of the time plus one bucket and one trial. Trials begin at
random moments, so that real and measured losses differ by a martingale.

Wu, Shariff, Lattimore and Szepesvari, "Conservative bandits", ICML 2016.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BUCKET_SECONDS = 5.0

_MEMORY = 0.9  # weight of earlier probes after each probe
_LEAST_PROBES = 3
_CAUTION = 0.02  # loss that a probe is expected to have at least


@dataclass
class _Probes:
    """Weighted sums over probes: number, logarithms of the speed-up, and their squares. Recent probes count most."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, log: float) -> None:
        self.count = _MEMORY * self.count + 1
        self.total = _MEMORY * self.total + log
        self.squares = _MEMORY * self.squares + log**2

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def certain(self) -> float:
        """Lower bound of the mean: the mean less its standard error."""
        if self.count < sum(_MEMORY**n for n in range(_LEAST_PROBES)) - 1e-9:
            return -math.inf
        variance = max(self.squares / self.count - self.mean**2, 0.0)
        return self.mean - math.sqrt(variance / (self.count - 1))


class LossBudget:
    """Bucket of seconds that one drafter may lose.

    Attributes:
        allows: whether drafting is on.
        seconds: content of the bucket.
    """

    def __init__(self, max_loss: float) -> None:
        """Allow a loss of the share ``max_loss`` of the busy seconds."""
        self._max_loss = max_loss
        self.allows, self.seconds = True, BUCKET_SECONDS
        self._probes = _Probes()

    def passed(self, busy: float) -> None:
        """Refill the bucket for ``busy`` seconds of the engine."""
        self.seconds = min(self.seconds + self._max_loss * busy, BUCKET_SECONDS)

    def measured(self, log: float, seconds: float) -> None:
        """Add the logarithm of the speed-up of a trial, which represents ``seconds`` of drafting.

        While drafting is off, trials are probes.
        """
        self.seconds = min(self.seconds + math.expm1(log) * seconds, BUCKET_SECONDS)
        if self.allows:
            self.allows = self.seconds > 0
            return
        self._probes.add(log)
        if self.seconds >= BUCKET_SECONDS / 2 and self._probes.certain > 0:
            self.allows, self._probes = True, _Probes()

    def pays_for(self, seconds: float, since: float) -> bool:
        """Return whether half of the refill in the last ``since`` busy seconds pays for a probe of ``seconds``."""
        expected = max(-self._probes.mean, _CAUTION) * seconds
        return self.seconds > 0 and self._max_loss * since / 2 >= expected
