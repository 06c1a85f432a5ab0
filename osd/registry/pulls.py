"""Limit on the machines that read weights from an object store at the same time."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
from collections.abc import Generator

from redis.exceptions import RedisError

from osd.redis_client import RedisClient

logger = logging.getLogger(__name__)

_KEY = "osd:pulls"
_RETRY_SECONDS = (0.05, 0.25)

HELD_MS = 60_000
"""Validity of a turn in milliseconds; the turn of a dead process is free after that."""

WAIT_SECONDS = 30.0
"""Maximum time to wait for a turn."""

SPREAD_SECONDS = 2.0
"""Maximum random pause while Redis does not answer."""

_TAKE = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then
  return 0
end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


class Pulls(RedisClient):
    """Semaphore with ``limit`` turns for all machines that share the Redis at ``url``."""

    def __init__(self, url: str, limit: int) -> None:
        super().__init__(url)
        self._limit = limit
        self._take = self._client.register_script(_TAKE)

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Wait for a turn, at most 30 seconds, and hold it inside the context.

        After 30 seconds the caller continues without a turn, because a slow read is better than no new version. While
        Redis does not answer, the caller waits for a random time of up to two seconds.
        """
        token, taken = secrets.token_hex(8), False
        try:
            taken = self._wait_for_turn(token)
        except RedisError as error:
            logger.debug("no turns while Redis does not answer: %s", error)
            time.sleep(random.uniform(0, SPREAD_SECONDS))  # noqa: S311  no secret
        try:
            yield
        finally:
            if taken:
                with contextlib.suppress(RedisError):  # the turn expires by itself
                    self._client.zrem(_KEY, token)

    def _wait_for_turn(self, token: str) -> bool:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._take(keys=[_KEY], args=[token, self._limit, HELD_MS]):
            if time.monotonic() > deadline:
                logger.warning("no turn to read weights within %.0f s; reading without a turn", WAIT_SECONDS)
                return False
            time.sleep(random.uniform(*_RETRY_SECONDS))  # noqa: S311  no secret
        return True
