"""Redis Streams of captured records, one per domain, and the number of records that wait on them.

An entry has one field, ``t``, with the msgpack bytes of the record. Its id is ``<number>-<made>``: ``number`` counts
the entries of the stream, and ``made`` is the time of creation in milliseconds since the epoch. So the lag of a reader
and the age of waiting records follow from ids alone, without reading records.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import redis
from redis.exceptions import ResponseError

from osd.config import check_domain


def stream_of(prefix: str, domain: str) -> str:
    """Return the key of a domain's stream; ``prefix`` is ``capture.stream`` or ``tap.stream``.

    Raises:
        ValueError: the domain is not a valid name.
    """
    return f"{prefix}:domain:{check_domain(domain)}"


def counter_key(stream: str) -> str:
    """Return the key of the number of the newest entry."""
    return f"{stream}:count"


def index_key(prefix: str) -> str:
    """Return the key of the sorted set of domains with a stream; the score is the last write in milliseconds."""
    return f"{prefix}:domains"


def refused_key(prefix: str) -> str:
    """Return the key of the stream of refused records, which are kept for inspection."""
    return f"{prefix}:refused"


def domains_in(client: redis.Redis, prefix: str) -> list[str]:
    """Return the domains that have a stream, most recently written first.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """
    domains: Any = client.zrevrange(index_key(prefix), 0, -1)
    return [domain.decode() for domain in domains]


# Only the id leaves Redis, because an entry may take a megabyte.
_NEXT = """
local entry = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', 1)[1]
return entry and entry[1] or ''
"""


class Waiting(NamedTuple):
    """Records that a consumer group has not acknowledged.

    Attributes:
        records: the number of records.
        since: the time of creation of the oldest, in seconds since the epoch; None without records or when unknown.
    """

    records: int
    since: float | None

    @property
    def age(self) -> float | None:
        """Age of the oldest record in seconds; 0 without records, None when unknown."""
        if not self.records:
            return 0.0
        return None if self.since is None else max(time.time() - self.since, 0.0)


NONE = Waiting(0, None)


class StreamState(NamedTuple):
    """State of a domain's stream.

    Attributes:
        records: the number of records.
        bytes: the memory that they take in Redis.
        waiting: the records that the trainer has not acknowledged; None when no trainer reads the stream.
    """

    records: int
    bytes: int
    waiting: Waiting | None


def group_of(domain: str) -> str:
    """Return the name of the consumer group of the domain's trainer."""
    return f"trainer-{domain}"


def waiting(client: redis.Redis, streams: Iterable[str], group: str) -> Waiting:
    """Return the records of several streams that a group has not acknowledged.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """
    parts = [_waiting_for_group(client, stream, group) or _waiting_without_group(client, stream) for stream in streams]
    times = [part.since for part in parts if part.since is not None]
    return Waiting(sum(part.records for part in parts), min(times, default=None))


def stream_states(client: redis.Redis, prefix: str) -> dict[str, StreamState]:
    """Return the state of each domain's stream, most recently written first.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """
    states: dict[str, StreamState] = {}
    for domain in domains_in(client, prefix):
        stream = stream_of(prefix, domain)
        with client.pipeline(transaction=False) as pipe:
            pipe.xlen(stream)
            pipe.memory_usage(stream, samples=0)
            records, size = pipe.execute()
        states[domain] = StreamState(records, size or 0, _waiting_for_group(client, stream, group_of(domain)))
    return states


def _waiting_for_group(client: redis.Redis, stream: str, group: str) -> Waiting | None:
    """Return the records that wait for a group, or None when the group does not exist."""
    with client.pipeline(transaction=True) as pipe:
        pipe.xlen(stream)
        pipe.get(counter_key(stream))
        pipe.xinfo_groups(stream)
        pipe.xpending(stream, group)
        length, newest, groups, pending = pipe.execute(raise_on_error=False)
    for answer in (length, newest):
        if isinstance(answer, Exception):
            raise answer
    info = None
    if not isinstance(groups, ResponseError):  # an error means that the stream does not exist yet
        info = next((entry for entry in groups if entry["name"].decode() == group), None)
    if info is None:
        return None
    last = info["last-delivered-id"].decode()
    unread = min(length, max(0, int(newest or 0) - int(last.partition("-")[0])))
    first = pending["min"].decode() if info["pending"] else _next_id(client, stream, last) if unread else ""
    return Waiting(unread + info["pending"], _creation_time(first))


def _waiting_without_group(client: redis.Redis, stream: str) -> Waiting:
    """Return all records of a stream, for a group that does not exist yet."""
    length: Any = client.xlen(stream)
    return Waiting(length, _creation_time(_next_id(client, stream, "0-0")) if length else None)


def _next_id(client: redis.Redis, stream: str, after: str) -> str:
    id: Any = client.eval(_NEXT, 1, stream, after)
    return id.decode()


def _creation_time(id: str) -> float | None:
    milliseconds = int(id.partition("-")[2] or 0)
    return milliseconds / 1000 if milliseconds else None
