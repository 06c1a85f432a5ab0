"""Scheduler of the domains of one trainer: one domain computes at a time, the most valuable one first."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable


class DomainScheduler:
    """Scheduler that gives the turn to the waiting domain whose next slice is most valuable.

    Equally valuable domains share the time by stride scheduling (Waldspurger and Weihl, 1995): the next turn goes to
    the domain with the least computing time so far. After a rest a domain continues level with the others, so rest is
    not saved.
    """

    def __init__(self, domains: Iterable[str], clock: Callable[[], float] = time.process_time) -> None:
        """Create a scheduler of ``domains``; ``clock`` returns the CPU seconds of the whole trainer."""
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
        """Add a domain, level with the others."""
        with self._changed:
            self._charge()
            self._passes[domain], self._charged[domain] = self._level, 0.0

    def leave(self, domain: str) -> None:
        """Remove a domain whose thread has ended."""
        with self._changed:
            self._release(domain)
            self._charge()
            del self._passes[domain], self._charged[domain]
            self._worth.pop(domain, None)

    def set_value(self, domain: str, worth: float) -> None:
        """Set the value of a second of this domain; it is 0 at first."""
        with self._changed:
            self._worth[domain] = worth

    def acquire(self, domain: str, stop: threading.Event, patience: float = math.inf) -> bool:
        """Wait for the turn; a domain that has it gives it up first.

        Returns:
            False when ``stop`` was set, or after ``patience`` seconds.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            has_rested = self._holder != domain
            self._release(domain)
            if has_rested:
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

    def holds(self, domain: str) -> bool:
        """Return whether a domain has the turn."""
        with self._changed:
            return self._holder == domain

    def release(self, domain: str) -> None:
        """Give up the turn; do nothing when the domain does not have it."""
        with self._changed:
            self._release(domain)

    def cpu_seconds(self, domain: str) -> float:
        """Return the CPU seconds of a domain, on all threads.

        They are the CPU seconds of its turns, and an equal part of the CPU seconds outside all turns. So the sum over
        all domains is the CPU time of the trainer.
        """
        with self._changed:
            self._charge()
            return self._charged[domain]

    def _order(self, domain: str) -> tuple[float, float, str]:
        return -self._worth.get(domain, 0.0), self._passes[domain], domain

    def _charge(self) -> None:
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        charged = self._charged if self._holder is None else (self._holder,)
        for domain in charged:
            self._charged[domain] += seconds / len(charged)

    def _release(self, domain: str) -> None:
        if self._holder != domain:
            return
        self._charge()
        self._passes[domain] += time.monotonic() - self._since
        self._holder = None
        self._changed.notify_all()
