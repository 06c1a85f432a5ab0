"""What processes say of themselves in a Redis hash: each tells again and again, and who is silent is gone."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import redis
from redis.exceptions import DataError

# Reports carry the server's time: the clocks of who tells and of who reads may differ.
_TELL = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now[1] * 1000 + now[2] / 1000) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('EXISTS', KEYS[2])
"""

# It writes too: a Redis that takes no reports, because it is full or a replica, must not look like one without any.
_READ = """
local now = redis.call('TIME')
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
end
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

_Said = TypeVar("_Said")


class LiveReports(Generic[_Said]):
    """Reports of one ``kind`` under one key, by the names of who tells; ``tell`` and ``read`` are a round trip each.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
    """

    def __init__(self, client: redis.Redis, key: str, kind: type[_Said] | Any, what: str) -> None:
        """Errors name ``what`` the reports are."""
        self._client, self._key, self._kind, self._what = client, key, kind, what
        self._keys = [key, f"{key}:read"]
        self._tell, self._read = client.register_script(_TELL), client.register_script(_READ)

    def tell(self, name: str, said: _Said, expiry_ms: int, pipeline: redis.Redis | None = None) -> Any:
        """Say it in the place of what ``name`` said before; all of them go when nobody tells for ``expiry_ms``.

        Says whether somebody looks at the reports, which a ``pipeline`` answers when it is executed.
        """
        return self._tell(self._keys, [name, msgspec.json.encode(said), expiry_ms], pipeline)

    def read(self, expiry_ms: int, attention_ms: int) -> dict[str, _Said]:
        """What was said within the last ``expiry_ms``; somebody looks for ``attention_ms`` from now on.

        Raises:
            redis.exceptions.RedisError: also when Redis takes no reports now.
        """
        fields: list[bytes] = self._read(self._keys, [expiry_ms, attention_ms])
        try:
            return {
                name.decode(): msgspec.json.decode(data, type=self._kind)
                for name, data in zip(fields[::2], fields[1::2], strict=True)
            }
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(f"{self._what}: {error}") from None

    def withdraw(self, name: str) -> None:
        """Take back what was said: who said it ends."""
        self._client.hdel(self._key, name)
