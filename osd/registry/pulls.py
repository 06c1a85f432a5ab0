"""How many machines read weights from an object store at the same time, so that a new version is no storm."""

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
_LOOK_SECONDS = (0.05, 0.25)

HELD_MS = 60_000
"""After which the turn of a process that died is free."""

WAIT_SECONDS = 30.0
"""For a turn."""

SPREAD_SECONDS = 2.0
"""Longest pause where Redis gives no turns."""

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
    """``most`` turns for all machines that share the Redis at ``url``."""

    def __init__(self, url: str, most: int) -> None:
        super().__init__(url)
        self._most = most
        self._take = self._client.register_script(_TAKE)

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Wait for a turn, for half a minute at most: a version that comes in a crowd is better than none.

        Without Redis whoever comes waits for a random part of two seconds instead.
        """
        mine, taken = secrets.token_hex(8), False
        try:
            taken = self._taken(mine)
        except RedisError as error:
            logger.debug("nobody says whose turn it is: %s", error)
            time.sleep(random.uniform(0, SPREAD_SECONDS))  # noqa: S311  no secret
        try:
            yield
        finally:
            if taken:
                with contextlib.suppress(RedisError):  # it is free after a while
                    self._client.zrem(_KEY, mine)

    def _taken(self, mine: str) -> bool:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._take(keys=[_KEY], args=[mine, self._most, HELD_MS]):
            if time.monotonic() > deadline:
                logger.warning("no turn to read weights in %.0f s, going on without one", WAIT_SECONDS)
                return False
            time.sleep(random.uniform(*_LOOK_SECONDS))  # noqa: S311  no secret
        return True
