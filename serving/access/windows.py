"""Sliding windows that count the requests and tokens of keys over all replicas."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import redis
from limits import RateLimitItem, RateLimitItemPerDay, RateLimitItemPerMinute
from limits.storage import MemoryStorage, RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from redis.exceptions import RedisError

from osd.redis_client import Backoff, connect
from serving.access.keys import Limits

logger = logging.getLogger(__name__)

_PREFIX = "osd:limits"
_UNLIMITED = 2**50  # tokens are counted after they are produced, so the counter must accept more than the limit

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Window:
    """State of a limit of a key in a sliding window.

    Attributes:
        limit: largest number of units in the window.
        used: units in the last ``seconds``.
        seconds: length of the window.
        wait: seconds until ``used`` is below ``limit``.
        reset: seconds until ``used`` is zero, without further use.
    """

    limit: int
    used: float
    seconds: int
    wait: float
    reset: float

    @property
    def remaining(self) -> int:
        """Whole units that are left."""
        return max(0, self.limit - math.ceil(self.used))

    @classmethod
    def of(cls, limit: int, seconds: int, counted: tuple[int, float, int, float]) -> Window:
        """Return the sliding window that two adjacent fixed windows approximate.

        Args:
            limit: largest number of units.
            seconds: length of the window.
            counted: count of the previous fixed window, seconds until it stops counting, count of the current fixed
                window, seconds until that stops counting.
        """
        previous, previous_left, current, current_left = counted
        used = previous * previous_left / seconds + current
        if used < limit:
            wait = 0.0
        elif current < limit:
            wait = previous_left - (limit - current) * seconds / previous
        else:
            wait = current_left - seconds * limit / current
        return cls(limit, used, seconds, wait, current_left if current else previous_left if previous else 0.0)


@dataclass(frozen=True)
class KeyUsage:
    """Usage of a key at the time of a request.

    Attributes:
        admitted: whether the request is within all limits.
        requests: requests of the minute; None without that limit.
        tokens: tokens of the minute; None without that limit.
        quota: tokens of the day; None without that limit.
    """

    admitted: bool
    requests: Window | None
    tokens: Window | None
    quota: Window | None


class Windows:
    """Counts of all keys, kept in Redis.

    While Redis does not answer, each process counts for itself and logs a warning once. Thread-safe.
    """

    def __init__(self, redis_url: str | None) -> None:
        """Count in the Redis of ``redis_url``; None counts in this process only."""
        self._client = connect(redis_url) if redis_url else None
        self._shared = _redis_limiter(self._client) if self._client is not None else None
        self._local: SlidingWindowCounterRateLimiter | None = None
        self._backoff, self._lock = Backoff(), threading.Lock()

    def admit(self, name: str, limits: Limits) -> KeyUsage:
        """Count a request of the key ``name`` unless a limit is reached, and return the usage of the key.

        ``KeyUsage.admitted`` is the decision. An admitted request is included in ``requests``, its tokens only after
        ``charge``.
        """

        def count(limiter: SlidingWindowCounterRateLimiter) -> KeyUsage:
            tokens = _read_window(limiter, _minute(_UNLIMITED, "tokens"), name, limits.tokens_per_minute)
            quota = _read_window(limiter, _day(_UNLIMITED), name, limits.tokens_per_day)
            admitted = all(window is None or window.used < window.limit for window in (tokens, quota))
            if limits.requests_per_minute is None:
                return KeyUsage(admitted, None, tokens, quota)
            item = _minute(limits.requests_per_minute, "requests")
            admitted = admitted and limiter.hit(item, name)
            return KeyUsage(admitted, _read_window(limiter, item, name, item.amount), tokens, quota)

        return self._count(count)

    def charge(self, name: str, tokens: int) -> None:
        """Add ``tokens`` to the counts of the key ``name``."""

        def count(limiter: SlidingWindowCounterRateLimiter) -> None:
            limiter.hit(_minute(_UNLIMITED, "tokens"), name, cost=tokens)
            limiter.hit(_day(_UNLIMITED), name, cost=tokens)

        self._count(count)

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _count(self, count: Callable[[SlidingWindowCounterRateLimiter], _Kind]) -> _Kind:
        if self._shared is not None and not self._backoff.remaining:
            try:
                result = count(self._shared)
            except RedisError as error:
                if not self._backoff.failing:
                    logger.warning("limits of keys are counted per replica because Redis does not answer: %s", error)
                self._backoff.failed()
            else:
                if self._backoff.failing:
                    logger.warning("limits of keys are counted over all replicas again")
                self._backoff.worked()
                return result
        with self._lock:
            self._local = self._local or SlidingWindowCounterRateLimiter(MemoryStorage())
        return count(self._local)


def _redis_limiter(client: redis.Redis) -> SlidingWindowCounterRateLimiter:
    storage = RedisStorage("redis://", connection_pool=client.connection_pool, key_prefix=_PREFIX)
    storage.storage = client  # this client handles the errors of a demoted Redis master
    storage.initialize_storage("")
    return SlidingWindowCounterRateLimiter(storage)


def _minute(amount: int, unit: str) -> RateLimitItem:
    return RateLimitItemPerMinute(amount, namespace=unit)


def _day(amount: int) -> RateLimitItem:
    return RateLimitItemPerDay(amount, namespace="tokens")


def _read_window(
    limiter: SlidingWindowCounterRateLimiter, item: RateLimitItem, name: str, limit: int | None
) -> Window | None:
    if limit is None:
        return None
    seconds = item.get_expiry()
    return Window.of(limit, seconds, limiter.storage.get_sliding_window(item.key_for(name), seconds))  # type: ignore[union-attr]
