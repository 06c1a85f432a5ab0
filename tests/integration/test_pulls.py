"""Turns to read weights from a store, by a real Redis."""

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


def test_no_more_have_a_turn_at_a_time_than_may(redis_url: str):
    now, most, done, lock = [0], [0], [0], threading.Lock()

    def pull(_: int) -> None:
        with Pulls(redis_url, 2) as mine, mine.turn():
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.05)
            with lock:
                now[0] -= 1
                done[0] += 1

    together(pull, range(8))
    assert (most[0], done[0]) == (2, 8)


def test_a_turn_is_given_back_when_the_pull_fails(redis_url: str, redis_client: redis.Redis):
    with Pulls(redis_url, 1) as mine:
        with pytest.raises(OSError, match="gone"), mine.turn():
            raise OSError("gone")
        assert redis_client.zcard(KEY) == 0


def test_turn_of_a_process_that_died_is_free_after_a_minute(redis_url: str, redis_client: redis.Redis):
    with Pulls(redis_url, 1) as mine, mine.turn():
        ((_, until),) = redis_client.zrange(KEY, 0, -1, withscores=True)
        seconds, microseconds = redis_client.time()
        left = until - 1000 * seconds - microseconds / 1000
        assert 0 < left <= 60_000
        assert 0 < redis_client.pttl(KEY) <= 60_000
        redis_client.zadd(KEY, {"dead": 1000 * seconds - 1})
        with Pulls(redis_url, 2) as other, other.turn():
            assert redis_client.zcard(KEY) == 2
            assert redis_client.zscore(KEY, "dead") is None


def test_nobody_waits_for_ever(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(pulls, "WAIT_SECONDS", 0.2)
    with Pulls(redis_url, 1) as other, Pulls(redis_url, 1) as mine, other.turn():
        with mine.turn():
            assert "going on without one" in caplog.text
        assert redis_client.zcard(KEY) == 1


def test_without_redis_it_goes_on_after_a_pause(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulls, "SPREAD_SECONDS", 0.01)
    with Pulls(redis_server.url, 1) as mine:
        redis_server.close()
        with mine.turn():
            pass
