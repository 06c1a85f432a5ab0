"""Redis connections that fail soon instead of hanging."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def connect(url: str, timeout: float = 0.5) -> redis.Redis:
    """Make a client that answers or raises within ``timeout`` seconds for each of connecting, sending, receiving.

    Callers decide whether and when to try again, so the client itself never repeats a command.
    """
    # The older protocol gives the same reply types with every server version from 6.2 on.
    return redis.Redis.from_url(
        url, socket_timeout=timeout, socket_connect_timeout=timeout, protocol=2, retry=Retry(NoBackoff(), 0)
    )
