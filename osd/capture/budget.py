"""Which records are kept when not all of them may be: a sample that takes so many bytes a second, chosen by worth.

A record is kept with a chance that is known before it is drawn, and carries one over that chance as its weight. Sums
over kept records in which each counts by its weight are therefore those of all records, on average (Horvitz and
Thompson, JASA 1952), whatever the chances depend on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import redis

from osd.hashing import unit_hash
from osd.redis_client import LiveReports

SECONDS = 10.0
"""Over which bytes are averaged: a burst may take what so many seconds allow, and has to be made up for later."""

SHARE_SECONDS = 1.0
"""Between two looks at what other writers would write."""

_EXPIRY_MS = 5000  # after which a writer that is silent has ended
_EVEN = 0.1
_FIRST = 1.0  # seconds that the first records are taken for
_STEEP = 3.0
_RAREST = 1e-4


_Record = TypeVar("_Record")


class Budget(Generic[_Record]):
    """Draws which records are kept, for one thread; those offered should take ``rate`` bytes a second.

    A record's chance is its score times what makes the expected bytes those allowed, by the scores and sizes of the
    last seconds: a token bucket that fills at the rate, and never holds more than ten seconds of it, raises all
    chances while it is full, and lowers them while it is in debt. None of that depends on the record's own draw.
    """

    def __init__(
        self, rate: float, score: Callable[[_Record], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``score`` is above 0 and at most 1, and says how much a record is wanted beside others."""
        self.rate = rate
        self._score, self._clock = score, clock
        self._began = self._at = clock()
        self._wanted = 0.0  # bytes offered, times their scores, of the last seconds
        self._level = rate * SECONDS

    @property
    def demand(self) -> float:
        """Bytes a second that are offered, times their scores."""
        self._pass()
        return self._demand()

    def weight(self, record: _Record, key: str, size: int) -> float | None:
        """One over the chance with which a record is kept, None for one that is not.

        ``key`` names it for the draw, and ``size`` bytes are written of it.
        """
        score = self._score(record)
        self._pass()
        self._wanted += score * size
        burst = self.rate * SECONDS
        full = math.exp(_STEEP * max(min(self._level / burst, 1.0), -_STEEP))
        chance = min(max(full * score * self.rate / self._demand(), _RAREST), 1.0)
        if unit_hash(key.encode(), b"budget") >= chance:
            return None
        self._level -= size
        return 1 / chance

    def _demand(self) -> float:
        elapsed = max(self._at - self._began, _FIRST)
        return self._wanted / (SECONDS * -math.expm1(-elapsed / SECONDS))

    def _pass(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        self._wanted *= math.exp(-passed / SECONDS)
        self._level = min(self._level + self.rate * passed, self.rate * SECONDS)


class BudgetShare:
    """This writer's part of ``rate`` bytes a second: a tenth is divided evenly, the rest by what each has to write."""

    def __init__(self, client: redis.Redis, prefix: str, name: str, rate: float) -> None:
        """Share among the writers of the streams below ``prefix``; of two with one ``name`` only the latest counts."""
        self._demands = LiveReports(client, f"{prefix}:demand", float, "demand of writers")
        self._name, self._rate = name, rate
        self._told_at = -SHARE_SECONDS

    @property
    def due(self) -> bool:
        """Whether it is time to look."""
        return time.monotonic() - self._told_at >= SHARE_SECONDS

    def look(self, demand: float) -> float:
        """Say how many bytes a second this one would write, and return how many it may.

        Raises:
            redis.exceptions.RedisError: Redis does not answer; it is asked again a second later.
        """
        self._told_at = time.monotonic()
        self._demands.tell(self._name, demand, _EXPIRY_MS)
        demands = self._demands.read(_EXPIRY_MS, _EXPIRY_MS) | {self._name: demand}
        total, even = sum(demands.values()), 1 / len(demands)
        return self._rate * (_EVEN * even + (1 - _EVEN) * (demand / total if total else even))
