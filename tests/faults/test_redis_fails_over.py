"""Failover by sentinels: a replica replaces a dead Redis, and capture continues there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import redis

from osd.capture.server import open_redis
from osd.capture.streams import stream_of
from osd.capture.writer import TraceWriter
from osd.config import CaptureSettings, load_settings
from osd.redis_client import connect
from tests.redis_servers import PASSWORD, pair, run
from tests.traces import small_trace

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "the Redis master is killed and a replica takes over",
        "writers follow the sentinels; lost traces are counted",
        process="redis-server: SIGKILL of the master",
    ),
]

CAPTURE = CaptureSettings(max_records=100, max_queue=8)


def test_writers_follow_sentinels_to_the_new_master(tmp_path: Path, eventually, fault_result):
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    with pair(tmp_path) as (old, new):
        config = [
            f"sentinel monitor service 127.0.0.1 {old} 1",
            f"sentinel auth-pass service {PASSWORD}",
            "sentinel down-after-milliseconds service 1500",
            "sentinel failover-timeout service 2000",
        ]
        with run(tmp_path / "sentinel", *config, arguments=("--sentinel",)) as sentinel:
            url = f"redis_url=redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/service/0"
            settings = load_settings(None, [url, f"redis.password_file={password}", "redis_prefix=test:"], {})
            with open_redis(settings) as handle, connect(handle.url) as client:
                client.set("a", 1)
                writer = TraceWriter(handle.url, CAPTURE)
                with redis.Redis(port=sentinel) as guard:
                    eventually(
                        lambda: [slave["master-link-status"] for slave in guard.sentinel_slaves("service")] == ["ok"]
                    )
                with redis.Redis(port=old, password=PASSWORD) as master:
                    master.wait(1, 5000)
                    os.kill(master.info("server")["process_id"], signal.SIGKILL)
                began = time.monotonic()

                def written() -> bool:
                    writer.offer(small_trace())
                    return writer.counters()["written"] > 0

                eventually(written, seconds=30)
                fault_result.seconds = time.monotonic() - began
                counters = writer.counters()
                fault_result.lost = f"{counters['dropped']} traces, counted, and no key"
                assert client.get("a") == b"1"
                client.set("a", 2)
                writer.close()
            with redis.Redis(port=new, password=PASSWORD) as server:
                assert server.get("test:a") == b"2"
                assert server.exists("test:" + stream_of(CAPTURE.stream, "general"))
