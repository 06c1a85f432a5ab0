"""Reads of traces that leave the streams unchanged: new traces of other replicas, and the newest of all domains."""

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

_READ_TIMEOUT = 5.0  # seconds; a trace with hidden states takes about a megabyte
_RECORDS, _BATCHES = 8, 8  # records per read, and reads per stream and call


class _WriterField(msgspec.Struct, frozen=True):
    """Name of the replica in a trace; the other fields are skipped."""

    replica: str = ""


_writer_decoder = msgspec.msgpack.Decoder(_WriterField)


class TraceTail:
    """Reader of the traces that other replicas write after its first read of a stream, for use by one thread.

    While Redis does not answer there are no traces. Traces that Redis still has are returned later.
    """

    def __init__(self, url: str, settings: CaptureSettings, replica: str) -> None:
        """Read from the Redis at ``url``, and skip the traces of ``replica`` itself."""
        self._prefix, self._replica = settings.stream, replica
        self._client = connect(url, timeout=_READ_TIMEOUT)
        self._backoff = Backoff()
        self._last_ids: dict[str, str] = {}  # id of the last entry read, by stream

    def new(self, domains: Iterable[str]) -> Iterator[Trace]:
        """Yield the traces of some domains since the previous call, at most 64 per domain.

        The first call for a domain yields nothing. Records that are not traces are skipped.
        """
        for stream in [stream_of(self._prefix, domain) for domain in domains]:
            for _ in range(_BATCHES):
                entries = self._read(stream)
                for id, fields in entries:
                    self._last_ids[stream] = id.decode()
                    trace = self._decode(fields.get(FIELD, b""))
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
            if stream not in self._last_ids:
                newest: Any = self._client.get(counter_key(stream))
                self._last_ids[stream] = f"{int(newest or 0) + 1}-0" if newest else "0-0"
            entries: Any = self._client.xrange(stream, min=f"({self._last_ids[stream]}", count=_RECORDS)
        except (RedisError, ValueError) as error:
            self._failed(error)
            return []
        self._backoff.worked()
        return entries

    def _failed(self, error: Exception) -> None:
        if not self._backoff.failing:
            logger.warning("traces of other replicas cannot be read; trying again: %s", error)
        self._backoff.failed()

    def _decode(self, data: bytes) -> Trace | None:
        try:
            return None if _writer_decoder.decode(data).replica == self._replica else decode(data)
        except (TraceError, msgspec.MsgspecError):  # the trainer's reader logs such records
            return None


class NoTracesError(ValueError):
    """Absence of traces, as a message of one line with the name of the streams."""


def newest(url: str, prefix: str, records: int) -> Iterator[Trace]:
    """Yield the newest traces of all streams under a prefix, newest first, and leave them on the streams.

    Args:
        url: the URL of Redis.
        prefix: the prefix of the streams.
        records: the maximum number of records to read; records that are not traces are skipped.

    Raises:
        NoTracesError: there is no trace.
        redis.exceptions.RedisError: Redis does not answer.
    """
    is_empty = True
    for data in _newest_records(url, prefix, records):
        try:
            trace = decode(data)
        except TraceError:
            continue
        is_empty = False
        yield trace
    if is_empty:
        raise NoTracesError(f"the streams {prefix} hold no trace")


def _newest_records(url: str, prefix: str, records: int) -> Iterator[bytes]:
    client = connect(url, timeout=_READ_TIMEOUT)
    try:
        streams = [_read_backwards(client, stream_of(prefix, domain), records) for domain in domains_in(client, prefix)]
        for _, (_, data) in zip(range(records), heapq.merge(*streams, key=lambda entry: -entry[0]), strict=False):
            yield data
    finally:
        client.close()


def _read_backwards(client: redis.Redis, stream: str, records: int) -> Iterator[tuple[int, bytes]]:
    """Yield the records of a stream, newest first, as the time of creation in milliseconds and the bytes."""
    last = "+"
    while True:
        entries: Any = client.xrevrange(stream, max=last, count=min(records, _RECORDS))
        for id, fields in entries:
            yield int(id.partition(b"-")[2]), fields.get(FIELD, b"")
            last = f"({id.decode()}"
        if not entries:
            return
