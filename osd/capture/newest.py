"""The newest traces of a stream, for whoever looks at them and takes nothing away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError

from osd.capture.trace import FIELD, Trace, TraceError, decode
from osd.redis_client import connect

_TIMEOUT = 5.0  # seconds
_RECORDS = 8  # of one answer of Redis: traces with hidden states take about a megabyte each


class NoTracesError(ValueError):
    """Traces cannot be read, or there is none; the message is one line that says why."""


def newest(url: str, stream: str, records: int) -> Iterator[Trace]:
    """At most ``records`` traces of a stream, the newest first, left where they are.

    Records that are no traces are passed over.

    Raises:
        NoTracesError: Redis does not answer, or there is no trace.
    """
    found = False
    try:
        for data in _entries(url, stream, records):
            try:
                trace = decode(data)
            except TraceError:
                continue
            found = True
            yield trace
    except RedisError as error:
        raise NoTracesError(f"traces cannot be read from Redis: {error}") from None
    if not found:
        raise NoTracesError(f"the stream {stream} holds no trace")


def _entries(url: str, stream: str, records: int) -> Iterator[bytes]:
    client = connect(url, timeout=_TIMEOUT)
    try:
        last = "+"
        while records:
            entries: Any = client.xrevrange(stream, max=last, count=min(records, _RECORDS))
            for id, fields in entries:
                yield fields.get(FIELD, b"")
                last = f"({id.decode()}"
            records = records - len(entries) if entries else 0
    finally:
        client.close()
