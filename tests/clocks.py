"""Clock that advances only when a test moves it or waits on it."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Fake clock in seconds, usable as a function, as the ``time`` module, and as an event that ends a wait."""

    def __init__(self) -> None:
        self.now, self.over = 100.0, False
        self._planned: list[tuple[float, Callable[[], object]]] = []

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` once ``seconds`` have passed."""
        self._planned.append((self.now + seconds, action))

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.0)
        for planned in [entry for entry in self._planned if entry[0] <= self.now]:
            self._planned.remove(planned)
            planned[1]()

    def wait(self, seconds: float) -> bool:
        self.sleep(seconds)
        return self.over

    def is_set(self) -> bool:
        return self.over

    def set(self) -> None:
        self.over = True
