"""How busy replicas are: each reports its load to Redis, and the trainer reads when to pause."""

from __future__ import annotations

import msgspec
from redis.exceptions import DataError

from osd.redis_client import RedisClient

EXPIRY_MS = 2000
"""A replica that has not reported for so long is gone."""

_KEY, _READ_KEY = "osd:load", "osd:load:read"

# Reports carry the server's time: the clocks of replicas and trainer may differ.
_REPORT = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now[1] * 1000 + now[2] / 1000) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""

# It writes too: a Redis that takes no reports, because it is full or a replica, must not look like one without any.
_READ = """
local now = redis.call('TIME')
redis.call('SET', KEYS[2], 1, 'PX', ARGV[1])
local oldest = now[1] * 1000 + now[2] / 1000 - ARGV[1]
local fields = redis.call('HGETALL', KEYS[1])
local fresh = {}
for i = 1, #fields, 2 do
  local space = string.find(fields[i + 1], ' ', 1, true)
  if tonumber(string.sub(fields[i + 1], 1, space - 1)) < oldest then
    redis.call('HDEL', KEYS[1], fields[i])
  else
    fresh[#fresh + 1] = fields[i]
    fresh[#fresh + 1] = string.sub(fields[i + 1], space + 1)
  end
end
return fresh
"""


class ReplicaLoad(msgspec.Struct, frozen=True):
    """What a replica does now: requests running and waiting, its drafter version, completion tokens per second.

    ``inter_token_ms`` is the mean time between two tokens of a request since the report before, 0 without tokens.
    """

    running: int
    waiting: int
    drafter_version: int
    tokens_per_second: float
    inter_token_ms: float = 0.0


class ReplicaLoads(RedisClient):
    """The loads of all replicas, in one Redis hash; each method is one round trip.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._report = self._client.register_script(_REPORT)
        self._read = self._client.register_script(_READ)

    def report(self, replica_id: str, load: ReplicaLoad) -> None:
        """Report a replica's load; it stays for two seconds."""
        self._report(keys=[_KEY], args=[replica_id, msgspec.json.encode(load), EXPIRY_MS])

    def read(self) -> dict[str, ReplicaLoad]:
        """The loads of the replicas that reported within the last two seconds.

        Raises:
            redis.exceptions.RedisError: also when Redis takes no reports now.
        """
        fields: list[bytes] = self._read(keys=[_KEY, _READ_KEY], args=[EXPIRY_MS])
        try:
            return {
                name.decode(): msgspec.json.decode(data, type=ReplicaLoad)
                for name, data in zip(fields[::2], fields[1::2], strict=True)
            }
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(f"replica loads: {error}") from None
