"""What other replicas decoded, as it comes, by the table that learns it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from redis.exceptions import RedisError

from osd.capture.streams import counter_key, stream_of
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
    """Reads what others put on streams after the first look at each, for one thread.

    With Redis gone there is nothing to read, and later what is still there.
    """

    def __init__(self, url: str, settings: CaptureSettings, replica: str) -> None:
        """Leave out what ``replica`` wrote itself."""
        self._prefix, self._replica = settings.stream, replica
        self._client = connect(url, timeout=_READ_TIMEOUT)
        self._backoff = Backoff()
        self._seen: dict[str, str] = {}  # of each stream the id after which to go on

    def new(self, domains: Iterable[str]) -> Iterator[Trace]:
        """What came of these domains since the last one that was taken, a few dozen of each.

        Of a domain that is asked for the first time that is nothing; what is no trace is left out.
        """
        for stream in [stream_of(self._prefix, domain) for domain in domains]:
            for _ in range(_BATCHES):
                entries = self._read(stream)
                for id, fields in entries:
                    self._seen[stream] = id.decode()
                    trace = self._trace(fields.get(FIELD, b""))
                    if trace is not None:
                        yield trace
                if len(entries) < _RECORDS:
                    break

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _read(self, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if self._backoff.remaining:
            return []
        try:
            if stream not in self._seen:
                newest: Any = self._client.get(counter_key(stream))
                self._seen[stream] = f"{int(newest or 0) + 1}-0" if newest else "0-0"
            entries: Any = self._client.xrange(stream, min=f"({self._seen[stream]}", count=_RECORDS)
        except (RedisError, ValueError) as error:
            self._failed(error)
            return []
        self._backoff.worked()
        return entries

    def _failed(self, error: Exception) -> None:
        if not self._backoff.failing:
            logger.warning("the traces of other replicas cannot be read, trying again: %s", error)
        self._backoff.failed()

    def _trace(self, data: bytes) -> Trace | None:
        try:
            return None if _writer.decode(data).replica == self._replica else decode(data)
        except (TraceError, msgspec.MsgspecError):  # the trainer's reader says so
            return None
