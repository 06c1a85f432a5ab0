"""Traces as they come, for replicas that learn from each other: nothing is taken from the trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.capture.stream import counter_key
from osd.capture.trace import FIELD, Trace, TraceError, decode
from osd.config import CaptureSettings
from osd.redis_client import Backoff, connect

logger = logging.getLogger(__name__)

_READ_TIMEOUT = 5.0  # seconds; traces with hidden states take about a megabyte each
_RECORDS, _BATCHES = 8, 8


class _Writer(msgspec.Struct, frozen=True):
    """Of a trace what is asked first; the rest is skipped."""

    replica: str = ""


_writer = msgspec.msgpack.Decoder(_Writer)


class TraceTail:
    """Reads what others put on the stream after the first look, for one thread.

    With Redis gone there is nothing to read, and later what is still there.
    """

    def __init__(self, url: str, settings: CaptureSettings, replica: str) -> None:
        """Leave out what ``replica`` wrote itself."""
        self._stream, self._replica = settings.stream, replica
        self._client = connect(url, timeout=_READ_TIMEOUT)
        self._backoff = Backoff()
        self._last: str | None = None

    def new(self) -> Iterator[Trace]:
        """What came since the last one that was taken, a few dozen at most; what is no trace is left out."""
        for _ in range(_BATCHES):
            entries = self._read()
            for id, fields in entries:
                self._last = id.decode()
                trace = self._trace(fields.get(FIELD, b""))
                if trace is not None:
                    yield trace
            if len(entries) < _RECORDS:
                return

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _read(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if self._backoff.remaining:
            return []
        try:
            if self._last is None:
                newest: Any = self._client.get(counter_key(self._stream))
                self._last = f"{int(newest or 0)}-0"
            entries: Any = self._client.xrange(self._stream, min=f"({self._last}", count=_RECORDS)
        except (RedisError, ValueError) as error:
            if not self._backoff.failing:
                logger.warning("the traces of other replicas cannot be read, trying again: %s", error)
            self._backoff.failed()
            return []
        self._backoff.worked()
        return entries

    def _trace(self, data: bytes) -> Trace | None:
        try:
            return None if _writer.decode(data).replica == self._replica else decode(data)
        except (TraceError, msgspec.MsgspecError):  # the trainer's reader says so
            return None
