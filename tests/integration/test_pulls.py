"""Turns to read weights from an object store, in a real Redis server."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from osd.capture.server import RedisServer
from osd.registry import pulls
from osd.registry.pulls import Pulls
from tests.waiting import together

KEY = "osd:pulls"


def test_pulls_give_at_most_the_configured_turns_at_a_time(redis_url: str):
    running, peak, done, lock = [0], [0], [0], threading.Lock()

    def pull(_: int) -> None:
        with Pulls(redis_url, 2) as waiter, waiter.turn():
            with lock:
                running[0] += 1
                peak[0] = max(peak[0], running[0])
            time.sleep(0.05)
            with lock:
                running[0] -= 1
                done[0] += 1

    together(pull, range(8))
    assert (peak[0], done[0]) == (2, 8)


def test_turn_is_returned_when_the_pull_fails(redis_url: str, redis_client: redis.Redis):
    with Pulls(redis_url, 1) as waiter:
        with pytest.raises(OSError, match="gone"), waiter.turn():
            raise OSError("gone")
        assert redis_client.zcard(KEY) == 0


def test_turn_of_a_dead_process_expires_after_a_minute(redis_url: str, redis_client: redis.Redis):
    with Pulls(redis_url, 1) as waiter, waiter.turn():
        ((_, until),) = redis_client.zrange(KEY, 0, -1, withscores=True)
        seconds, microseconds = redis_client.time()
        remaining = until - 1000 * seconds - microseconds / 1000
        assert 0 < remaining <= 60_000
        assert 0 < redis_client.pttl(KEY) <= 60_000
        redis_client.zadd(KEY, {"dead": 1000 * seconds - 1})
        with Pulls(redis_url, 2) as second, second.turn():
            assert redis_client.zcard(KEY) == 2
            assert redis_client.zscore(KEY, "dead") is None


def test_pull_continues_without_a_turn_after_the_wait(redis_url: str, redis_client: redis.Redis, monkeypatch, caplog):
    monkeypatch.setattr(pulls, "WAIT_SECONDS", 0.2)
    with Pulls(redis_url, 1) as holder, Pulls(redis_url, 1) as waiter, holder.turn():
        with waiter.turn():
            assert "reading without a turn" in caplog.text
        assert redis_client.zcard(KEY) == 1


def test_pull_without_redis_continues_after_a_pause(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulls, "SPREAD_SECONDS", 0.01)
    with Pulls(redis_server.url, 1) as waiter:
        redis_server.close()
        with waiter.turn():
            pass
