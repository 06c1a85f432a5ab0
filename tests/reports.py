"""Reports that expire in Redis, made older than they are so that no test has to wait."""

from __future__ import annotations

import redis


def let_time_pass(client: redis.Redis, key: str, name: str, milliseconds: int) -> None:
    """Make the report of ``name`` under ``key`` older by ``milliseconds``."""
    written, _, report = client.hget(key, name).partition(b" ")
    client.hset(key, name, b"%d %s" % (int(written) - milliseconds, report))
