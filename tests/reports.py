"""Ageing of reports in Redis, so that tests need not wait for their expiry."""

from __future__ import annotations

import redis


def let_time_pass(client: redis.Redis, key: str, name: str, milliseconds: int) -> None:
    """Age the report of ``name`` under ``key`` by ``milliseconds``."""
    written, _, report = client.hget(key, name).partition(b" ")
    client.hset(key, name, b"%d %s" % (int(written) - milliseconds, report))
