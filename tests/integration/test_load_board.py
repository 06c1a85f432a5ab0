"""Loads of replicas in a real Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from osd.capture.server import RedisServer
from osd.registry import load_board
from osd.registry.load_board import LoadBoard, ReplicaLoad

IDLE, BUSY = ReplicaLoad(1, 0, 3, 40.5), ReplicaLoad(16, 5, 3, 90.0)


@pytest.fixture
def board(redis_url: str) -> Iterator[LoadBoard]:
    made = LoadBoard(redis_url)
    yield made
    made.close()


def test_nobody_reported_reads_empty(board: LoadBoard):
    assert board.read() == {}


def test_last_report_of_each_replica_is_read(board: LoadBoard):
    board.report("a", BUSY)
    board.report("b", BUSY)
    board.report("a", IDLE)
    assert board.read() == {"a": IDLE, "b": BUSY}


def test_silent_replica_expires_while_another_goes_on(
    board: LoadBoard, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(load_board, "EXPIRY_MS", 300)
    board.report("silent", BUSY)
    for _ in range(5):
        time.sleep(0.1)
        board.report("alive", IDLE)
    assert board.read() == {"alive": IDLE}
    assert redis_client.hlen("osd:load") == 1
    time.sleep(0.4)
    assert board.read() == {}
    assert redis_client.keys("osd:load*") == []


def test_foreign_content_is_an_error_of_redis(board: LoadBoard, redis_client: redis.Redis):
    board.report("a", IDLE)
    stamp = redis_client.hget("osd:load", "a").partition(b" ")[0]
    redis_client.hset("osd:load", "b", stamp + b" {}")
    with pytest.raises(redis.RedisError, match=r"^load board: "):
        board.read()


def test_many_threads_share_a_board(board: LoadBoard):
    threads = [threading.Thread(target=board.report, args=(str(number), IDLE)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.read().keys() == {str(number) for number in range(8)}


def test_redis_gone_raises_soon_and_works_again_afterwards(redis_server: RedisServer, board: LoadBoard):
    board.report("a", BUSY)
    redis_server.close()
    started = time.monotonic()
    with pytest.raises(redis.RedisError):
        board.report("a", IDLE)
    with pytest.raises(redis.RedisError):
        board.read()
    assert time.monotonic() - started < 2.0
    redis_server.start()
    board.report("a", IDLE)
    assert board.read() == {"a": IDLE}
