"""A token bucket: so many bytes a second, and some more at once."""

from __future__ import annotations


class TokenBucket:
    """Holds ``burst`` at most, and gets ``rate`` a second; full at first.

    Read the other way round it is a queue of at most ``burst`` bytes that is emptied at ``rate``: what it does not hold
    any more is what waits.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._held, self._at = burst, 0.0

    def part(self, now: float, amount: float) -> float:
        """The share of so much that there is; it is gone. ``now`` never goes back."""
        self._held = min(self._held + self._rate * (now - self._at), self._burst)
        self._at = now
        part = min(self._held / amount, 1.0)
        self._held -= part * amount
        return part
