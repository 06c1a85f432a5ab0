"""What an operator switches in every replica at once: one small JSON object in Redis, polled."""

from __future__ import annotations

import msgspec
from redis.exceptions import DataError

from osd.redis_client import connect

_KEY = "osd:control"


class Switches(msgspec.Struct, frozen=True):
    """``speculation`` False makes every request decode plainly."""

    speculation: bool = True


class Control:
    """Reads and sets the switches, one round trip each.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
    """

    def __init__(self, url: str) -> None:
        self._client = connect(url)

    def get(self) -> Switches:
        """The switches as they are; the defaults when nobody has set any."""
        data = self._client.get(_KEY)
        if data is None:
            return Switches()
        try:
            return msgspec.json.decode(data, type=Switches)
        except msgspec.MsgspecError as error:
            raise DataError(f"{_KEY}: {error}") from None

    def set(self, switches: Switches) -> None:
        """Set the switches; replicas follow within a second."""
        self._client.set(_KEY, msgspec.json.encode(switches))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
