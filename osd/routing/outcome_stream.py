"""Where replicas tell each other what they learnt of drafters: a Redis Stream."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from osd.capture.retention import belongs
from osd.redis_client import RedisClient
from osd.routing.router import Outcome

STREAM = "osd:routing"
"""Its key."""

_MOST = 512  # outcomes on it: what a new replica begins with
_OUTCOME, _BY = b"outcome", b"replica"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outcome)


class OutcomeStream(RedisClient):
    """The outcomes of all replicas, the last 512; each method is one round trip or two.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._last = "-"

    def tell(self, outcome: Outcome, replica: str) -> None:
        """Append what a replica learnt."""
        fields: Any = {_OUTCOME: _encoder.encode(outcome), _BY: replica}
        self._client.xadd(STREAM, fields, maxlen=_MOST, approximate=False)

    def new(self, replica: str) -> list[Outcome]:
        """What others than ``replica`` told since the last call, at the first all that there is."""
        found: list[Outcome] = []
        entries: Any = self._client.xrange(STREAM, min=self._last)
        for id, fields in entries:
            self._last = f"({id.decode()}"
            if fields.get(_BY) != replica.encode() and (outcome := _read(fields)) is not None:
                found.append(outcome)
        return found

    def expire(self, oldest: float) -> None:
        """Delete what was told before a time, in seconds since the epoch."""
        self._client.xtrim(STREAM, minid=f"{int(1000 * oldest)}", approximate=False)

    def forget(self, request: str) -> int:
        """Delete what was learnt from a request; returns how many outcomes there were."""
        entries: Any = self._client.xrange(STREAM)
        told = [(id, _read(fields)) for id, fields in entries]
        ids = [id for id, outcome in told if outcome is not None and belongs(outcome.request_id, request)]
        return int(self._client.xdel(STREAM, *ids)) if ids else 0


def _read(fields: dict[bytes, bytes]) -> Outcome | None:
    """None for what is none."""
    try:
        outcome = _decoder.decode(fields.get(_OUTCOME, b""))
    except msgspec.MsgspecError:
        return None
    return outcome if math.isfinite(outcome.gain) else None
