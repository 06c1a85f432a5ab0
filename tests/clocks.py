"""A clock that only moves when a test moves it or waits on it."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """``now`` in seconds, as a function, as the ``time`` module, and as the event that ends a wait.

    ``at`` plans what happens when.
    """

    def __init__(self) -> None:
        self.now, self.over = 100.0, False
        self._planned: list[tuple[float, Callable[[], object]]] = []

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` as soon as so many seconds have passed."""
        self._planned.append((self.now + seconds, action))

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.0)
        for planned in [one for one in self._planned if one[0] <= self.now]:
            self._planned.remove(planned)
            planned[1]()

    def wait(self, seconds: float) -> bool:
        self.sleep(seconds)
        return self.over

    def is_set(self) -> bool:
        return self.over

    def set(self) -> None:
        self.over = True
