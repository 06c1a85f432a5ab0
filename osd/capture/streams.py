"""The Redis Streams of a service, one for each domain, and how many records wait on them.

An entry has one field, ``t``: the msgpack bytes of the record. Its id is ``<number>-<made>``: the number counts the
entries of the stream, and ``made`` is when its record was made, in milliseconds since the epoch. So the lag of a reader
and the age of what waits for it can be told without reading any record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import redis
from redis.exceptions import ResponseError

from osd.config import check_domain


def stream_of(prefix: str, domain: str) -> str:
    """The key of a domain's stream; ``prefix`` is ``capture.stream`` or ``tap.stream``.

    Raises:
        ValueError: the domain is not a valid name.
    """
    return f"{prefix}:domain:{check_domain(domain)}"


def counter_key(stream: str) -> str:
    """The key that holds the number of the newest entry."""
    return f"{stream}:count"


def index_key(prefix: str) -> str:
    """The key of the sorted set of all domains that have a stream, by the time of their last record in milliseconds."""
    return f"{prefix}:domains"


def domains_in(client: redis.Redis, prefix: str) -> list[str]:
    """The domains that have a stream, the one written to last first.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """
    found: Any = client.zrevrange(index_key(prefix), 0, -1)
    return [domain.decode() for domain in found]


# The id alone leaves Redis: an entry may take a megabyte.
_NEXT = """
local entry = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', 1)[1]
return entry and entry[1] or ''
"""


class Waiting(NamedTuple):
    """``records`` that a group has not acknowledged, the oldest made at ``since``, in seconds since the epoch.

    ``since`` is None where there is none, or where it is not known.
    """

    records: int
    since: float | None

    @property
    def age(self) -> float | None:
        """Seconds since the oldest was made; 0 where none waits."""
        if not self.records:
            return 0.0
        return None if self.since is None else max(time.time() - self.since, 0.0)


NONE = Waiting(0, None)


class StreamState(NamedTuple):
    """A domain's stream: its ``records`` and the ``bytes`` that they take; ``waiting`` where a trainer reads it."""

    records: int
    bytes: int
    waiting: Waiting | None


def group_of(domain: str) -> str:
    """The group by which the trainer of a domain reads."""
    return f"trainer-{domain}"


def waiting(client: redis.Redis, streams: Iterable[str], group: str) -> Waiting:
    """What a group has not acknowledged yet of all these streams.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """
    found = [_of_stream(client, stream, group) or _unread(client, stream) for stream in streams]
    since = [one.since for one in found if one.since is not None]
    return Waiting(sum(one.records for one in found), min(since, default=None))


def look(client: redis.Redis, prefix: str) -> dict[str, StreamState]:
    """The state of every domain's stream, the one written to last first.

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
        states[domain] = StreamState(records, size or 0, _of_stream(client, stream, group_of(domain)))
    return states


def _of_stream(client: redis.Redis, stream: str, group: str) -> Waiting | None:
    """None where there is no such group."""
    with client.pipeline(transaction=True) as pipe:
        pipe.xlen(stream)
        pipe.get(counter_key(stream))
        pipe.xinfo_groups(stream)
        pipe.xpending(stream, group)
        length, newest, groups, pending = pipe.execute(raise_on_error=False)
    for answer in (length, newest):
        if isinstance(answer, Exception):
            raise answer
    mine = None
    if not isinstance(groups, ResponseError):  # else there is no stream yet
        mine = next((one for one in groups if one["name"].decode() == group), None)
    if mine is None:
        return None
    last = mine["last-delivered-id"].decode()
    unread = min(length, max(0, int(newest or 0) - int(last.partition("-")[0])))
    first = pending["min"].decode() if mine["pending"] else _next(client, stream, last) if unread else ""
    return Waiting(unread + mine["pending"], _made(first))


def _unread(client: redis.Redis, stream: str) -> Waiting:
    """All of a stream that nobody has begun to read."""
    length: Any = client.xlen(stream)
    return Waiting(length, _made(_next(client, stream, "0-0")) if length else None)


def _next(client: redis.Redis, stream: str, after: str) -> str:
    found: Any = client.eval(_NEXT, 1, stream, after)
    return found.decode()


def _made(id: str) -> float | None:
    made = int(id.partition("-")[2] or 0)
    return made / 1000 if made else None
