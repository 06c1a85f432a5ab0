"""The newest traces of all domains, for whoever looks at them and takes nothing away."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import redis
from redis.exceptions import RedisError

from osd.capture.streams import domains_in, stream_of
from osd.capture.trace import FIELD, Trace, TraceError, decode
from osd.redis_client import connect

_TIMEOUT = 5.0  # seconds
_RECORDS = 8  # of one answer of Redis: traces with hidden states take about a megabyte each


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
    client = connect(url, timeout=_TIMEOUT)
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
