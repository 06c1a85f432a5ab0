"""The Redis that osd started is killed: it comes back under the same URL, and what uses it goes on."""

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
    ),
]

BACK_SECONDS = 5
CAPTURE = CaptureSettings(max_records=100, max_queue=8)


def crash(server: RedisServer) -> None:
    """Kill the server and wait until another one answers."""
    before = server.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    with redis.Redis.from_url(server.url) as client:

        def answers() -> bool:
            with contextlib.suppress(redis.RedisError):
                return bool(client.ping() and server.pid != before)
            return False

        wait_until(answers, BACK_SECONDS)


def test_it_comes_back_with_its_password_and_captures_go_on_with_the_group_made_anew(server, eventually, aftermath):
    url = server.url
    writer, reader = TraceWriter(url, CAPTURE), TraceReader(url, CAPTURE, "general", "trainer", "c")
    try:
        with RedisSupervisor(server):
            writer.offer(small_trace(request_id="before"))
            (first,) = reader.read(1, block_ms=5000)
            reader.ack([first.place])
            begun = time.monotonic()
            crash(server)
            aftermath.seconds = time.monotonic() - begun
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
            aftermath.lost = f"{writer.counters()['dropped']} of {offered} traces, counted"
    finally:
        writer.close()
        reader.close()


def test_a_server_that_cannot_start_is_tried_again(server, monkeypatch, eventually, caplog, aftermath):
    start, tries = server.start, []

    def fail_twice() -> None:
        tries.append(0)
        if len(tries) < 3:
            raise OSError("no memory")
        start()

    monkeypatch.setattr(server, "start", fail_twice)
    with RedisSupervisor(server):
        begun = time.monotonic()
        crash(server)
        aftermath.seconds = time.monotonic() - begun
    assert len(tries) == 3
    assert "redis-server ended by itself, starting it again" in caplog.text
