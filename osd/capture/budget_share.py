"""What a writer may write of the bytes that all writers of a service may: told through Redis, once a second."""

from __future__ import annotations

import time

import redis

SHARE_SECONDS = 1.0
"""Between two looks."""

_EXPIRY_MS = 5000
_EVEN = 0.1

_TELL = """
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', ms) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local fields, sum, writers = redis.call('HGETALL', KEYS[1]), 0, 0
for i = 1, #fields, 2 do
  local told, wanted = string.match(fields[i + 1], '^(%S+) (%S+)$')
  if tonumber(told) < ms - ARGV[3] then
    redis.call('HDEL', KEYS[1], fields[i])
  else
    sum, writers = sum + tonumber(wanted), writers + 1
  end
end
return {tostring(sum), writers}
"""


def demand_key(prefix: str) -> str:
    """The key of what each writer would write, below the ``prefix`` of its streams."""
    return f"{prefix}:demand"


class BudgetShare:
    """This writer's part of ``rate`` bytes a second: a tenth is divided evenly, the rest by what each has to write."""

    def __init__(self, client: redis.Redis, prefix: str, name: str, rate: float) -> None:
        """In the name of the writer ``name``; of two with one name only the latest counts."""
        self._tell = client.register_script(_TELL)
        self._key, self._name, self._rate = demand_key(prefix), name, rate
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
        total, writers = self._tell(keys=[self._key], args=[self._name, repr(demand), _EXPIRY_MS])
        wanted = float(total)
        part = demand / wanted if wanted else 1 / writers
        return self._rate * (_EVEN / writers + (1 - _EVEN) * part)
