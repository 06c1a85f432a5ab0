"""Loads of replicas in a real Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from osd.capture.server import RedisServer
from osd.machine import machine
from osd.registry import replica_loads
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads

KEY = f"osd:load:{machine()}"
IDLE, BUSY = ReplicaLoad(1, 0, 3, 40.5), ReplicaLoad(16, 5, 3, 90.0)


@pytest.fixture
def loads(redis_url: str) -> Iterator[ReplicaLoads]:
    made = ReplicaLoads(redis_url)
    yield made
    made.close()


def test_nobody_reported_reads_empty(loads: ReplicaLoads):
    assert loads.read() == {}


def test_last_report_of_each_replica_is_read(loads: ReplicaLoads):
    loads.report("a", BUSY)
    loads.report("b", BUSY)
    loads.report("a", IDLE)
    assert loads.read() == {"a": IDLE, "b": BUSY}


def test_silent_replica_expires_while_another_goes_on(
    loads: ReplicaLoads, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica_loads, "EXPIRY_MS", 300)
    loads.report("silent", BUSY)
    for _ in range(5):
        time.sleep(0.1)
        loads.report("alive", IDLE)
    assert loads.read() == {"alive": IDLE}
    assert redis_client.hlen(KEY) == 1
    time.sleep(0.4)
    assert loads.read() == {}
    assert not redis_client.exists(KEY)


def test_a_replica_hears_whether_somebody_looks(loads: ReplicaLoads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_loads, "ATTENTION_MS", 100)
    assert not loads.report("a", BUSY)
    loads.workloads()  # looks at something else
    assert not loads.report("a", BUSY)
    loads.read()
    assert loads.report("a", BUSY)
    time.sleep(0.15)
    assert not loads.report("a", BUSY)


def test_who_glances_has_no_replica_tell_more_often_nor_less(loads: ReplicaLoads):
    loads.report("a", BUSY)
    assert loads.read(glance=True) == {"a": BUSY}
    time.sleep(0.01)
    assert not loads.report("a", BUSY)
    loads.read()
    loads.read(glance=True)
    time.sleep(0.01)
    assert loads.report("a", BUSY)


def test_replicas_of_another_machine_are_not_among_those_of_this_one(loads: ReplicaLoads, redis_url: str):
    with ReplicaLoads(redis_url, "elsewhere") as others:
        others.report("b", BUSY)
        loads.report("a", IDLE)
        assert (loads.read(), others.read()) == ({"a": IDLE}, {"b": BUSY})


def test_foreign_content_is_an_error_of_redis(loads: ReplicaLoads, redis_client: redis.Redis):
    loads.report("a", IDLE)
    stamp = redis_client.hget(KEY, "a").partition(b" ")[0]
    redis_client.hset(KEY, "b", stamp + b" {}")
    with pytest.raises(redis.RedisError, match=r"^replica loads: "):
        loads.read()


def test_many_threads_report_at_once(loads: ReplicaLoads):
    threads = [threading.Thread(target=loads.report, args=(str(number), IDLE)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads.read().keys() == {str(number) for number in range(8)}


def test_redis_gone_raises_soon_and_works_again_afterwards(redis_server: RedisServer, loads: ReplicaLoads):
    loads.report("a", BUSY)
    redis_server.close()
    started = time.monotonic()
    with pytest.raises(redis.RedisError):
        loads.report("a", IDLE)
    with pytest.raises(redis.RedisError):
        loads.read()
    assert time.monotonic() - started < 2.0
    redis_server.start()
    loads.report("a", IDLE)
    assert loads.read() == {"a": IDLE}


def test_a_redis_that_takes_no_reports_is_not_one_without_replicas(loads: ReplicaLoads, redis_client: redis.Redis):
    redis_client.set("foreign", bytes(1 << 20))
    redis_client.config_set("maxmemory", "1mb")
    for call in (lambda: loads.report("a", BUSY), loads.read):
        with pytest.raises(redis.RedisError, match="maxmemory"):
            call()
    redis_client.config_set("maxmemory", "128mb")
    assert loads.read() == {}
