"""Turns to read weights from a store, by a real Redis."""

from __future__ import annotations

import threading
import time

import pytest

from osd.capture.server import RedisServer
from osd.registry import pulls
from osd.registry.pulls import Pulls


def test_no_more_have_a_turn_at_a_time_than_may(redis_url: str):
    now, most, done, lock = [0], [0], [0], threading.Lock()

    def pull() -> None:
        with Pulls(redis_url, 2) as mine, mine.turn():
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.05)
            with lock:
                now[0] -= 1
                done[0] += 1

    threads = [threading.Thread(target=pull) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], done[0]) == (2, 8)


def test_a_turn_is_given_back_when_the_pull_fails(redis_url: str):
    with Pulls(redis_url, 1) as mine:
        with pytest.raises(OSError, match="gone"), mine.turn():
            raise OSError("gone")
        assert mine._client.zcard(pulls._KEY) == 0


def test_what_somebody_who_died_had_is_free_after_a_while(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulls, "_HELD_MS", 100)
    with Pulls(redis_url, 1) as dead, Pulls(redis_url, 1) as mine:
        assert dead._taken("dead")
        began = time.monotonic()
        with mine.turn():
            assert 0.05 < time.monotonic() - began < 5


def test_nobody_waits_for_ever(redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(pulls, "_WAIT_SECONDS", 0.2)
    with Pulls(redis_url, 1) as other, Pulls(redis_url, 1) as mine:
        assert other._taken("other")
        with mine.turn():
            assert "going on without one" in caplog.text
        assert mine._client.zcard(pulls._KEY) == 1


def test_without_redis_it_goes_on_after_a_pause(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulls, "_SPREAD_SECONDS", 0.01)
    with Pulls(redis_server.url, 1) as mine:
        redis_server.close()
        with mine.turn():
            pass
