"""Redis connections that fail soon instead of hanging, and when to try again."""

from __future__ import annotations

import time
from typing import Self, TypeVar

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.exceptions import DataError
from redis.retry import Retry

_Kind = TypeVar("_Kind")

MIN_BACKOFF, MAX_BACKOFF = 0.05, 2.0
"""Seconds without a try after a failure; doubled up to the longest."""


def connect(url: str, timeout: float = 0.5) -> redis.Redis:
    """Make a client that answers or raises within ``timeout`` seconds for each of connecting, sending, receiving.

    Callers decide whether and when to try again, so the client itself never repeats a command.
    """
    # The older protocol gives the same reply types with every server version from 6.2 on.
    return redis.Redis.from_url(
        url, socket_timeout=timeout, socket_connect_timeout=timeout, protocol=2, retry=Retry(NoBackoff(), 0)
    )


def decoded(data: bytes | str, kind: type[_Kind], what: str) -> _Kind:
    """The JSON that Redis holds, as a ``kind``.

    Raises:
        DataError: it is none; names ``what`` was read.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"{what}: {error}") from None


class RedisClient:
    """Something kept in Redis, read and written over connections of its own; leaving it as a context closes them."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class Backoff:
    """When to try again after failures."""

    def __init__(self) -> None:
        self._delay = MIN_BACKOFF
        self._until = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the next try, 0 when it may be now."""
        return max(0.0, self._until - time.monotonic())

    @property
    def failing(self) -> bool:
        """Whether the last try failed."""
        return self._until > 0

    def failed(self) -> None:
        """Wait, twice as long as the last time."""
        self._until = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, MAX_BACKOFF)

    def worked(self) -> None:
        """Back to normal."""
        self._delay, self._until = MIN_BACKOFF, 0.0
