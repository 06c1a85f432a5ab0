"""Death of the Redis that osd started: it restarts under the same URL, and its clients continue."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import redis

from osd.capture.reader import TraceReader
from osd.capture.server import RedisServer, RedisSupervisor
from osd.capture.writer import TraceWriter
from osd.config import CaptureSettings
from tests.traces import small_trace
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "the Redis that `osd up` started is killed",
        "a new one answers within 5 s at the same URL; lost traces are counted",
        process="redis-server: SIGKILL",
    ),
]

BACK_SECONDS = 5
CAPTURE = CaptureSettings(max_records=100, max_queue=8)


def crash(server: RedisServer) -> None:
    """Kill the server and wait until its successor answers."""
    before = server.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    with redis.Redis.from_url(server.url) as client:

        def answers() -> bool:
            with contextlib.suppress(redis.RedisError):
                return bool(client.ping() and server.pid != before)
            return False

        wait_until(answers, BACK_SECONDS)


def test_redis_restarts_and_capture_continues(server, eventually, fault_result):
    url = server.url
    writer, reader = TraceWriter(url, CAPTURE), TraceReader(url, CAPTURE, "general", "trainer", "c")
    try:
        with RedisSupervisor(server):
            writer.offer(small_trace(request_id="before"))
            (first,) = reader.read(1, block_ms=5000)
            reader.ack([first.place])
            began = time.monotonic()
            crash(server)
            fault_result.seconds = time.monotonic() - began
            assert server.url == url
            offered = 1

            def written_again() -> bool:
                nonlocal offered
                offered += 1
                writer.offer(small_trace(request_id=f"after-{offered}"))
                time.sleep(0.05)
                return writer.counters()["written"] > 1

            eventually(written_again)
            assert reader.read(1, block_ms=5000)[0].record.request_id.startswith("after-")
            eventually(lambda: sum(writer.counters().values()) == offered)
            fault_result.lost = f"{writer.counters()['dropped']} of {offered} traces, counted"
    finally:
        writer.close()
        reader.close()


def test_failed_restart_is_retried(server, monkeypatch, eventually, caplog, fault_result):
    start, tries = server.start, []

    def fail_twice() -> None:
        tries.append(0)
        if len(tries) < 3:
            raise OSError("no memory")
        start()

    monkeypatch.setattr(server, "start", fail_twice)
    with RedisSupervisor(server):
        began = time.monotonic()
        crash(server)
        fault_result.seconds = time.monotonic() - began
    assert len(tries) == 3
    assert "redis-server ended by itself, starting it again" in caplog.text
