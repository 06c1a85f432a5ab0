"""The Redis Streams of a service: one for each domain, so that nobody reads what he does not want.

An entry has one field, ``t``: the msgpack bytes of the record. Its id is ``<number>-<made>``: the number counts the
entries of the stream, and ``made`` is when its record was made, in milliseconds since the epoch. So the lag of a reader
and the age of what waits for it can be told without reading any record.
"""

from __future__ import annotations

from typing import Any

import redis

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
