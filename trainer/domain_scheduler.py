"""The workers of several domains take turns: one computes at a time, where it is worth most."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable


class DomainScheduler:
    """Whose turn it is: of those that wait the one whose next slice is worth most.

    Where these are worth the same, by stride scheduling (Waldspurger and Weihl, 1995): the one that computed least so
    far is next. Who comes back from a rest starts level with the others: rest is not saved up.
    """

    def __init__(self, domains: Iterable[str], clock: Callable[[], float] = time.process_time) -> None:
        """Take turns among ``domains``; ``clock`` gives the CPU seconds of all that computes."""
        self._clock = clock
        self._changed = threading.Condition()
        self._passes = dict.fromkeys(domains, 0.0)
        self._charged = dict.fromkeys(self._passes, 0.0)
        self._mark = clock()
        self._worth: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._holder: str | None = None
        self._since = self._level = 0.0

    def join(self, domain: str) -> None:
        """Let one more domain take turns, level with the others."""
        with self._changed:
            self._charge()
            self._passes[domain], self._charged[domain] = self._level, 0.0

    def leave(self, domain: str) -> None:
        """A domain takes no more turns; its thread has ended."""
        with self._changed:
            self._give(domain)
            self._charge()
            del self._passes[domain], self._charged[domain]
            self._worth.pop(domain, None)

    def value(self, domain: str, worth: float) -> None:
        """A second of this domain is worth so much; 0 until it is said."""
        with self._changed:
            self._worth[domain] = worth

    def take(self, domain: str, stop: threading.Event, patience: float = math.inf) -> bool:
        """Wait for the turn; False when ``stop`` was set, or after ``patience`` seconds.

        Who has it already gives others the chance first.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            rested = self._holder != domain
            self._give(domain)
            if rested:
                self._passes[domain] = max(self._passes[domain], self._level)
            self._waiting.add(domain)
            while not stop.is_set() and time.monotonic() < deadline:
                if self._holder is None and domain == min(self._waiting, key=self._order):
                    self._waiting.discard(domain)
                    self._charge()
                    self._holder, self._since = domain, time.monotonic()
                    self._level = self._passes[domain]
                    return True
                self._changed.wait(0.05)
            self._waiting.discard(domain)
            self._changed.notify_all()
            return False

    def has(self, domain: str) -> bool:
        """Whether it is this domain's turn."""
        with self._changed:
            return self._holder == domain

    def give(self, domain: str) -> None:
        """Let others have the turn; nothing happens when it is not this domain's."""
        with self._changed:
            self._give(domain)

    def clock(self, domain: str) -> float:
        """This domain's CPU seconds, on all threads.

        Those are the ones of its turns, and its part of what was computed when it was nobody's: those of all domains
        add up to what was computed.
        """
        with self._changed:
            self._charge()
            return self._charged[domain]

    def _order(self, domain: str) -> tuple[float, float, str]:
        return -self._worth.get(domain, 0.0), self._passes[domain], domain

    def _charge(self) -> None:
        now = self._clock()
        spent, self._mark = now - self._mark, now
        charged = self._charged if self._holder is None else (self._holder,)
        for domain in charged:
            self._charged[domain] += spent / len(charged)

    def _give(self, domain: str) -> None:
        if self._holder != domain:
            return
        self._charge()
        self._passes[domain] += time.monotonic() - self._since
        self._holder = None
        self._changed.notify_all()
