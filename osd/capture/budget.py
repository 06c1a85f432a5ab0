"""Weighted sampling of records within a budget of bytes per second.

A record is kept with a chance that is fixed before the draw, and its weight is the inverse of that chance. So weighted
sums over kept records are unbiased estimates of the sums over all records, for any rule that sets the chances (Horvitz
and Thompson, JASA 1952).
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
"""Averaging time of the budget: a burst may take the bytes of ten seconds at once, which later traffic makes up for."""

SHARE_SECONDS = 1.0
"""Interval between two exchanges of demand with other writers."""

_EXPIRY_MS = 5000  # a writer without a report for this time counts as ended
_EVEN = 0.1  # share of the budget that is divided evenly between writers
_FIRST = 1.0  # seconds that the first records count for, before there is a rate
_STEEP = 3.0  # exponent by which a full or empty bucket changes all chances
_RAREST = 1e-4  # lowest chance, so the highest weight is 10,000


_Record = TypeVar("_Record")


class RecordSampler(Generic[_Record]):
    """Sampler that keeps about ``rate`` bytes per second, for use by one thread.

    The chance of a record is its score times a common factor, which follows from the scores and sizes of the last
    seconds. A token bucket of ten seconds raises the factor while it is full and lowers it while it is in debt. The
    factor does not depend on the draw of the record itself.
    """

    def __init__(
        self, rate: float, score: Callable[[_Record], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a sampler.

        Args:
            rate: bytes per second to keep.
            score: returns the relative value of a record, above 0 and at most 1.
            clock: returns the time in seconds.
        """
        self.rate = rate
        self._score, self._clock = score, clock
        self._began = self._updated = clock()
        self._scored_bytes = 0.0  # bytes times score of offered records, decaying over SECONDS
        self._level = rate * SECONDS

    @property
    def demand(self) -> float:
        """Sum of bytes times score of offered records per second, averaged over about ten seconds."""
        self._advance()
        return self._demand()

    def weight(self, record: _Record, key: str, size: int) -> float | None:
        """Draw whether to keep a record.

        Args:
            record: the record, for its score.
            key: the name of the record; the draw depends only on it.
            size: the bytes that the record takes when it is written.

        Returns:
            The inverse of the record's chance, or None when the record is not kept.
        """
        score = self._score(record)
        self._advance()
        self._scored_bytes += score * size
        capacity = self.rate * SECONDS
        factor = math.exp(_STEEP * max(min(self._level / capacity, 1.0), -_STEEP))
        chance = min(max(factor * score * self.rate / self._demand(), _RAREST), 1.0)
        if unit_hash(key.encode(), b"budget") >= chance:
            return None
        self._level -= size
        return 1 / chance

    def _demand(self) -> float:
        elapsed = max(self._updated - self._began, _FIRST)
        return self._scored_bytes / (SECONDS * -math.expm1(-elapsed / SECONDS))

    def _advance(self) -> None:
        now = self._clock()
        elapsed, self._updated = now - self._updated, now
        self._scored_bytes *= math.exp(-elapsed / SECONDS)
        self._level = min(self._level + self.rate * elapsed, self.rate * SECONDS)


class BudgetShare:
    """Share of one writer in a budget of ``rate`` bytes per second for all writers.

    A tenth of the budget is divided evenly, the rest by the demand of each writer.
    """

    def __init__(self, client: redis.Redis, prefix: str, name: str, rate: float) -> None:
        """Join the writers of the streams below ``prefix`` under a unique ``name``."""
        self._demands = LiveReports(client, f"{prefix}:demand", float, "demand of writers")
        self._name, self._rate = name, rate
        self._updated = -SHARE_SECONDS

    @property
    def due(self) -> bool:
        """Whether the last update is older than ``SHARE_SECONDS``."""
        return time.monotonic() - self._updated >= SHARE_SECONDS

    def update(self, demand: float) -> float:
        """Report this writer's demand and return its share, both in bytes per second.

        Raises:
            redis.exceptions.RedisError: Redis does not answer; the next update is due a second later.
        """
        self._updated = time.monotonic()
        self._demands.write(self._name, demand, _EXPIRY_MS)
        demands = self._demands.read(_EXPIRY_MS, _EXPIRY_MS) | {self._name: demand}
        total, even = sum(demands.values()), 1 / len(demands)
        return self._rate * (_EVEN * even + (1 - _EVEN) * (demand / total if total else even))
