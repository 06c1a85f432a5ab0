"""How long traces are kept on the stream, and how they are taken off it before that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import redis

from osd.capture.trace import FIELD
from osd.config import CaptureSettings

_DAY = 86_400.0
_BATCH = 8  # entries in one answer of Redis: traces with hidden states take about a megabyte each


class Head(msgspec.Struct, frozen=True):
    """What a trace says of itself; the rest is skipped."""

    request_id: str
    created: float


_head = msgspec.msgpack.Decoder(Head)


def oldest_allowed(settings: CaptureSettings, now: float) -> float | None:
    """The time before which no record may have been made, in seconds since the epoch; None for any age."""
    return None if settings.keep_days is None else now - settings.keep_days * _DAY


def belongs(request_id: str, asked: str) -> bool:
    """Whether a record is of the request ``asked``: by its own id, or by the id of the response it is a choice of."""
    return asked in (request_id, request_id.rpartition("-")[0])


class Retention:
    """Deletes records from the stream: those too old, those too many, and those of one request.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """

    def __init__(self, client: redis.Redis, settings: CaptureSettings) -> None:
        self._client, self._settings = client, settings

    def enforce(self, now: float) -> int:
        """Delete the oldest records as ``capture.keep_days`` and ``capture.keep_mb`` ask for; returns how many."""
        return self._expire(now) + self.shrink()

    def shrink(self) -> int:
        """Delete the oldest records until the stream takes at most ``capture.keep_mb``; returns how many."""
        stream, largest = self._settings.stream, self._settings.keep_mb
        gone = 0
        while largest is not None:
            size: Any = self._client.memory_usage(stream, samples=0)
            length: Any = self._client.xlen(stream)
            if not length or not size or size <= largest << 20:
                break
            # All records are taken for equally large; one at least goes, and the next look corrects.
            kept = min(length - 1, length * (largest << 20) // size)
            gone += int(self._client.xtrim(stream, maxlen=kept, approximate=False))
        return gone

    def purge(self, asked: str) -> int:
        """Delete the records of a request; returns how many there were."""
        ids = [id for id, head in self._heads() if head is not None and belongs(head.request_id, asked)]
        return int(self._client.xdel(self._settings.stream, *ids)) if ids else 0

    def _expire(self, now: float) -> int:
        oldest, expired = oldest_allowed(self._settings, now), []
        if oldest is None:
            return 0
        for id, head in self._heads():
            # What cannot be read has no age, and nobody to be kept for.
            if head is not None and head.created >= oldest:
                break
            expired.append(id)
        return int(self._client.xdel(self._settings.stream, *expired)) if expired else 0

    def _heads(self) -> Iterator[tuple[bytes, Head | None]]:
        start = "-"
        while True:
            entries: Any = self._client.xrange(self._settings.stream, min=start, count=_BATCH)
            for id, fields in entries:
                try:
                    yield id, _head.decode(fields.get(FIELD, b""))
                except msgspec.MsgspecError:
                    yield id, None
            if len(entries) < _BATCH:
                return
            start = "(" + entries[-1][0].decode()
