"""What was read from a storage where each look may cost, for as long as it may stand for what is there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

_Value = TypeVar("_Value")

_DOUBTED_SECONDS = 2.0


class Remembered:
    """Values that were read at most ``seconds`` ago: half as long or more, so that not all who read do so together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: dict[str, tuple[float, float, Any]] = {}  # when each was read, and until when it counts

    def get(self, name: str, read: Callable[[], _Value]) -> _Value:
        """What ``read`` gives, or gave before under this name."""
        _, until, value = self._values.get(name, (0.0, 0.0, None))
        now = time.monotonic()
        if now >= until:
            value = read()
            self._values[name] = now, now + self._seconds * random.uniform(0.5, 1), value  # noqa: S311  no secret
        return value

    def doubt(self) -> None:
        """Nobody tells of changes now: what was read counts for two seconds at most."""
        for name, (at, until, value) in list(self._values.items()):
            self._values[name] = at, min(until, at + _DOUBTED_SECONDS), value
