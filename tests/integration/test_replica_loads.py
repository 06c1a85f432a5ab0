"""Loads of replicas in a real Redis."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import redis

from osd.capture.server import RedisServer
from osd.economy.report import Comparison, Measured
from osd.registry import replica_loads
from osd.registry.replica_loads import ATTENTION_MS, EXPIRY_MS, DomainEffects, ReplicaLoad, ReplicaLoads, this_machine
from tests.reports import let_time_pass

KEY = f"osd:load:{this_machine()}"
IDLE, BUSY = ReplicaLoad(1, 0, 3, 40.5), ReplicaLoad(16, 5, 3, 90.0)


@pytest.fixture
def loads(redis_url: str, ends: ExitStack) -> ReplicaLoads:
    return ends.enter_context(ReplicaLoads(redis_url))


def test_last_report_of_each_replica_is_read(loads: ReplicaLoads):
    assert loads.read() == {}
    loads.report("a", BUSY)
    loads.report("b", BUSY)
    loads.report("a", IDLE)
    assert loads.read() == {"a": IDLE, "b": BUSY}


def test_replica_is_dropped_after_two_silent_seconds(
    loads: ReplicaLoads, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    loads.report("silent", BUSY)
    let_time_pass(redis_client, KEY, "silent", EXPIRY_MS + 1)
    loads.report("alive", IDLE)
    assert loads.read() == {"alive": IDLE}
    assert redis_client.hlen(KEY) == 1
    assert 0 < redis_client.pttl(KEY) <= EXPIRY_MS, "the key goes with the last replica"


def test_report_from_before_a_backward_clock_jump_is_dropped(loads: ReplicaLoads, redis_client: redis.Redis):
    for name, jump in (("dead", 3_600_000), ("alive", 500)):
        loads.report(name, BUSY)
        let_time_pass(redis_client, KEY, name, -jump)
    assert loads.read() == {"alive": BUSY}
    loads.report("dead", IDLE)
    assert loads.read().keys() == {"alive", "dead"}


def test_replica_is_kept_for_two_seconds_after_a_report(monkeypatch, loads, redis_client):
    monkeypatch.setattr(replica_loads, "EXPIRY_MS", 60_000)
    loads.report("slow", BUSY)
    let_time_pass(redis_client, KEY, "slow", 30_000)
    assert loads.read() == {"slow": BUSY}


def test_report_says_whether_the_loads_were_read_lately(loads: ReplicaLoads, redis_client: redis.Redis):
    assert not loads.report("a", BUSY)
    loads.work()  # another hash
    assert not loads.report("a", BUSY)
    loads.read()
    assert loads.report("a", BUSY)
    assert ATTENTION_MS / 2 < redis_client.pttl(f"{KEY}:read") <= ATTENTION_MS


def test_glance_leaves_the_rate_of_reports_as_it_is(loads: ReplicaLoads, redis_client: redis.Redis, eventually):
    loads.report("a", BUSY)
    assert loads.read(glance=True) == {"a": BUSY}
    eventually(lambda: not loads.report("a", BUSY))
    loads.read()
    loads.read(glance=True)
    assert redis_client.pttl(f"{KEY}:read") > ATTENTION_MS / 2


def test_loads_contain_replicas_of_this_machine_only(loads: ReplicaLoads, redis_url: str):
    with ReplicaLoads(redis_url, "elsewhere") as remote:
        remote.report("b", BUSY)
        loads.report("a", IDLE)
        assert (loads.read(), remote.read()) == ({"a": IDLE}, {"b": BUSY})


def test_foreign_content_is_an_error_of_redis(loads: ReplicaLoads, redis_client: redis.Redis):
    loads.report("a", IDLE)
    stamp = redis_client.hget(KEY, "a").partition(b" ")[0]
    redis_client.hset(KEY, "b", stamp + b" {}")
    with pytest.raises(redis.RedisError, match=r"^replica loads: "):
        loads.read()


def test_loads_raise_without_redis_and_work_afterwards(redis_server: RedisServer, loads: ReplicaLoads):
    loads.report("a", BUSY)
    redis_server.close()
    with pytest.raises(redis.RedisError):
        loads.report("a", IDLE)
    with pytest.raises(redis.RedisError):
        loads.read()
    redis_server.start()
    loads.report("a", IDLE)
    assert loads.read() == {"a": IDLE}


def test_full_redis_raises_in_reports_and_reads(loads: ReplicaLoads, redis_client: redis.Redis):
    redis_client.set("foreign", bytes(1 << 20))
    redis_client.config_set("maxmemory", "1mb")
    for call in (lambda: loads.report("a", BUSY), loads.read):
        with pytest.raises(redis.RedisError, match="maxmemory"):
            call()
    redis_client.config_set("maxmemory", "128mb")
    assert loads.read() == {}


def test_effects_of_versions_are_read_by_replica_and_domain(loads: ReplicaLoads):
    assert loads.effects() == {}
    comparison = Comparison(2, 1, Measured(40, 10.0, 10.5, 0.01))
    loads.report_effects("a", {"general": DomainEffects((comparison,)), "code": DomainEffects()})
    loads.report_effects("b", {})
    assert loads.effects() == {"a": {"general": DomainEffects((comparison,)), "code": DomainEffects()}, "b": {}}
