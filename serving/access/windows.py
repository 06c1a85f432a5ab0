"""What keys used in the last minute and the last day, counted over all replicas."""

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
_ANY = 2**50  # tokens are counted when they are there, also those above a limit

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Window:
    """One limit of a key: ``used`` of ``limit`` in the last ``seconds``.

    There is room again after ``wait`` seconds, and nothing counts any more after ``reset``.
    """

    limit: int
    used: float
    seconds: int
    wait: float
    reset: float

    @property
    def remaining(self) -> int:
        """What is left."""
        return max(0, self.limit - math.ceil(self.used))

    @classmethod
    def of(cls, limit: int, seconds: int, counted: tuple[int, float, int, float]) -> Window:
        """A window of ``seconds`` that slides, by what was ``counted`` in the last two that stand still.

        Those are the count of the one before, the seconds for which it still counts, the count of this one, and the
        seconds for which this one will.
        """
        before, before_left, now, now_left = counted
        used = before * before_left / seconds + now
        if used < limit:
            wait = 0.0
        elif now < limit:
            wait = before_left - (limit - now) * seconds / before
        else:
            wait = now_left - seconds * limit / now
        return cls(limit, used, seconds, wait, now_left if now else before_left if before else 0.0)


@dataclass(frozen=True)
class Used:
    """What a key has used: whether the request was ``admitted``, and its limits, None where it has none."""

    admitted: bool
    requests: Window | None
    tokens: Window | None
    quota: Window | None


class Windows:
    """Counts in Redis, or in this process while Redis does not answer, which is logged once; any thread may ask."""

    def __init__(self, redis_url: str | None) -> None:
        """Count in the Redis of ``redis_url``, None for this process alone."""
        self._client = connect(redis_url) if redis_url else None
        self._shared = _in_redis(self._client) if self._client is not None else None
        self._own: SlidingWindowCounterRateLimiter | None = None
        self._backoff, self._lock = Backoff(), threading.Lock()

    def admit(self, name: str, limits: Limits) -> Used:
        """Count a request of a key, unless one of its limits is reached."""

        def count(limiter: SlidingWindowCounterRateLimiter) -> Used:
            tokens = _look(limiter, _minute(_ANY, "tokens"), name, limits.tokens_per_minute)
            quota = _look(limiter, _day(_ANY), name, limits.tokens_per_day)
            admitted = all(window is None or window.used < window.limit for window in (tokens, quota))
            if limits.requests_per_minute is None:
                return Used(admitted, None, tokens, quota)
            item = _minute(limits.requests_per_minute, "requests")
            admitted = admitted and limiter.hit(item, name)
            return Used(admitted, _look(limiter, item, name, item.amount), tokens, quota)

        return self._count(count)

    def charge(self, name: str, tokens: int) -> None:
        """Count tokens of a key."""

        def count(limiter: SlidingWindowCounterRateLimiter) -> None:
            limiter.hit(_minute(_ANY, "tokens"), name, cost=tokens)
            limiter.hit(_day(_ANY), name, cost=tokens)

        self._count(count)

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _count(self, count: Callable[[SlidingWindowCounterRateLimiter], _Kind]) -> _Kind:
        if self._shared is not None and not self._backoff.remaining:
            try:
                found = count(self._shared)
            except RedisError as error:
                if not self._backoff.failing:
                    logger.warning("each replica counts for itself what keys use, Redis does not answer: %s", error)
                self._backoff.failed()
            else:
                if self._backoff.failing:
                    logger.warning("what keys use is counted over all replicas again")
                self._backoff.worked()
                return found
        with self._lock:
            self._own = self._own or SlidingWindowCounterRateLimiter(MemoryStorage())
        return count(self._own)


def _in_redis(client: redis.Redis) -> SlidingWindowCounterRateLimiter:
    storage = RedisStorage("redis://", connection_pool=client.connection_pool, key_prefix=_PREFIX)
    storage.storage = client  # it knows what a replica says that was the master
    storage.initialize_storage("")
    return SlidingWindowCounterRateLimiter(storage)


def _minute(amount: int, what: str) -> RateLimitItem:
    return RateLimitItemPerMinute(amount, namespace=what)


def _day(amount: int) -> RateLimitItem:
    return RateLimitItemPerDay(amount, namespace="tokens")


def _look(limiter: SlidingWindowCounterRateLimiter, item: RateLimitItem, name: str, limit: int | None) -> Window | None:
    if limit is None:
        return None
    seconds = item.get_expiry()
    return Window.of(limit, seconds, limiter.storage.get_sliding_window(item.key_for(name), seconds))  # type: ignore[union-attr]
