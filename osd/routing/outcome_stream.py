"""Redis Stream in which replicas share the measured gains of drafters."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from osd.capture.retention import belongs
from osd.redis_client import RedisClient
from osd.routing.router import Outcome

STREAM = "osd:routing"
"""Key of the stream."""

_MOST = 512  # outcomes on the stream, which a new replica starts from
_OUTCOME, _BY = b"outcome", b"replica"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outcome)


class OutcomeStream(RedisClient):
    """Stream of the last 512 outcomes of all replicas; each method takes one or two round trips.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or the key has another type.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._last = "-"

    def tell(self, outcome: Outcome, replica: str) -> None:
        """Append the outcome of a request of ``replica``."""
        fields: Any = {_OUTCOME: _encoder.encode(outcome), _BY: replica}
        self._client.xadd(STREAM, fields, maxlen=_MOST, approximate=False)

    def new(self, replica: str) -> list[Outcome]:
        """Return the outcomes of other replicas since the last call; the first call returns all."""
        outcomes: list[Outcome] = []
        entries: Any = self._client.xrange(STREAM, min=self._last)
        for id, fields in entries:
            self._last = f"({id.decode()}"
            if fields.get(_BY) != replica.encode() and (outcome := _read(fields)) is not None:
                outcomes.append(outcome)
        return outcomes

    def expire(self, oldest: float) -> None:
        """Delete outcomes older than ``oldest``, in seconds since the epoch."""
        self._client.xtrim(STREAM, minid=f"{int(1000 * oldest)}", approximate=False)

    def forget(self, request: str) -> int:
        """Delete the outcomes of a request; return their number."""
        entries: Any = self._client.xrange(STREAM)
        outcomes = [(id, _read(fields)) for id, fields in entries]
        ids = [id for id, outcome in outcomes if outcome is not None and belongs(outcome.request_id, request)]
        return int(self._client.xdel(STREAM, *ids)) if ids else 0


def _read(fields: dict[bytes, bytes]) -> Outcome | None:
    """Return the outcome of a stream entry, None if it is not valid."""
    try:
        outcome = _decoder.decode(fields.get(_OUTCOME, b""))
    except msgspec.MsgspecError:
        return None
    return outcome if math.isfinite(outcome.gain) else None
