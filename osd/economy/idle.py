"""Share of recent time without requests, which decides whether training runs beside requests."""

from __future__ import annotations

import math

_MEAN_SECONDS = 60.0  # time over which the share is averaged


class IdleShare:
    """Exponentially weighted share of the last minute or so in which no request ran; 0 at first.

    Attributes:
        value: the share, from 0 to 1.
    """

    def __init__(self) -> None:
        self.value = 0.0

    def observe(self, idle: bool, seconds: float) -> None:
        """Add ``seconds`` in which requests ran, or with ``idle`` none."""
        decay = math.exp(-seconds / _MEAN_SECONDS)
        self.value = decay * self.value + (1 - decay) * idle

    def suffices(self, duty: float) -> bool:
        """Return whether training without requests alone gets as much time as ``duty`` allows beside requests."""
        return self.value >= duty
