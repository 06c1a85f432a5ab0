"""Loss budget: drafting may lose a small share of the time, and is switched off when that is spent.

A drafter has a bucket of seconds. A share of the busy seconds and measured gains fill it, measured losses drain it, and
it overflows, so old gains do not pay for later losses. Drafting is off while the bucket is empty. Half of the
refill pays for probes, short blocks with drafting, also while the bucket is overdrawn. Drafting returns when the bucket
is half full and the probes gained with certainty. The measured loss exceeds that share of the time by at most one
bucket, one trial with the steps before it, and what probes lose beyond their expected loss. Trials begin at random
moments, so that real and measured losses differ by a martingale.

Wu, Shariff, Lattimore and Szepesvari, "Conservative bandits", ICML 2016.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, stdev

from osd.economy.effect import LEAST_TRIALS

BUCKET_SECONDS = 5.0
"""Largest content of a bucket, as ``docs/economy.md`` promises."""


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
        self._probes: deque[float] = deque(maxlen=LEAST_TRIALS)  # logarithms of the speed-up

    def passed(self, busy: float) -> None:
        """Refill the bucket for ``busy`` seconds of the engine."""
        self.seconds = min(self.seconds + self._max_loss * busy, BUCKET_SECONDS)

    def measured(self, log: float, seconds: float) -> None:
        """Add the logarithm of the speed-up over the ``seconds`` with drafting since the trial before.

        While drafting is off, trials are probes.
        """
        self.seconds = min(self.seconds + math.expm1(log) * seconds, BUCKET_SECONDS)
        if self.allows:
            self.allows = self.seconds > 0
            return
        self._probes.append(log)
        if self.seconds >= BUCKET_SECONDS / 2 and self._gains:
            self.allows = True
            self._probes.clear()

    @property
    def _gains(self) -> bool:
        """Whether the mean of the last probes is above 0 by more than its standard error."""
        probes, count = self._probes, len(self._probes)
        return count == LEAST_TRIALS and fmean(probes) > stdev(probes) / math.sqrt(count)

    def pays_for(self, seconds: float, since: float) -> bool:
        """Return whether half of the refill in the last ``since`` busy seconds pays for a probe of ``seconds``.

        A probe is expected to lose as much as the mean of the last probes, and at least the allowed share.
        """
        loss = max(-fmean(self._probes or [0.0]), self._max_loss)
        return self._max_loss * since / 2 >= loss * seconds
