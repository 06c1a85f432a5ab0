"""Reads of traces that take nothing from a stream: what comes from other replicas, and the newest of all domains."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import redis
from redis.exceptions import RedisError

from osd.capture.streams import counter_key, domains_in, stream_of
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


class NoTracesError(ValueError):
    """Traces cannot be read, or there is none; the message is one line that says why."""


def newest(url: str, prefix: str, records: int) -> Iterator[Trace]:
    """At most ``records`` traces of the streams under a prefix, the newest first, left where they are.

    Records that are no traces are passed over.

    Raises:
        NoTracesError: Redis does not answer, or there is no trace.
    """
    found = False
    try:
        for data in _entries(url, prefix, records):
            try:
                trace = decode(data)
            except TraceError:
                continue
            found = True
            yield trace
    except RedisError as error:
        raise NoTracesError(f"traces cannot be read from Redis: {error}") from None
    if not found:
        raise NoTracesError(f"the streams {prefix} hold no trace")


def _entries(url: str, prefix: str, records: int) -> Iterator[bytes]:
    client = connect(url, timeout=_READ_TIMEOUT)
    try:
        found = [_backwards(client, stream_of(prefix, domain), records) for domain in domains_in(client, prefix)]
        for _, (_, data) in zip(range(records), heapq.merge(*found, key=lambda entry: -entry[0]), strict=False):
            yield data
    finally:
        client.close()


def _backwards(client: redis.Redis, stream: str, records: int) -> Iterator[tuple[int, bytes]]:
    """When the records of a stream were made, in milliseconds, and their bytes; the newest first."""
    last = "+"
    while True:
        entries: Any = client.xrevrange(stream, max=last, count=min(records, _RECORDS))
        for id, fields in entries:
            yield int(id.partition(b"-")[2]), fields.get(FIELD, b"")
            last = f"({id.decode()}"
        if not entries:
            return
