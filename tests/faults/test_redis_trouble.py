"""Redis is slow, full, flushed, restarted, or down for half a minute: a replica keeps its speed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from osd import drafting
from osd.capture.server import RedisServer
from osd.capture.writer import TraceWriter
from osd.config import TrainerSettings
from osd.registry.pointer import Pointer, Rollout
from osd.registry.replica_loads import ReplicaLoads
from osd.registry.versions import Registry
from serving.replica.replica import Replica
from tests.pointers import put
from tests.redis_servers import TcpProxy
from tests.replicas import PROMPT, Replicas, decode
from tests.waiting import HANG_SECONDS, wait_until
from trainer.capacity import SpareCapacity

pytestmark = pytest.mark.soak

TOKENS, TURNS = 200, 7
MIN_SPEED = 0.4
"""Lowest share of the speed with a good Redis that a bad Redis may leave, on a machine with other load.

A request takes a fifth of a second, so one wait for an answer of Redis would leave less than 0.3.
"""
END_SECONDS = 15.0
DOWN_SECONDS = 30.0


@pytest.fixture
def address(server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(int(server.url.rpartition(":")[2].partition("/")[0])) as address:
        yield address


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[TraceWriter]:
    """Trace writers that replicas create."""
    created: list[TraceWriter] = []

    class RecordedWriter(TraceWriter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            created.append(self)

    monkeypatch.setattr("serving.replica.replica.TraceWriter", RecordedWriter)
    return created


@pytest.fixture
def replica(server: RedisServer, address: TcpProxy, writers, tiny_target, replica_settings) -> Iterator[Replica]:
    """Replica that drafts with a version, recalls, captures, and reaches Redis through the proxy."""
    settings = replica_settings
    first = drafting.initial(settings.drafter, tiny_target, settings.home_dir)
    Registry(settings.registry_dir).publish("general", first.weights(), first.config(), {})
    with Pointer(server.url, settings.registry_dir) as pointer:
        put(pointer, "general", Rollout(1, None, 0.0, 1.0))
    port = server.url.rpartition(":")[2].partition("/")[0]
    replicas = Replicas(settings, server.url.replace(f":{port}/", f":{address.port}/"))
    yield replicas.start("a")
    began = time.monotonic()
    replicas.end_all()
    assert time.monotonic() - began < END_SECONDS


class Traffic:
    """Sender of captured requests, one after the other."""

    def __init__(self, replica: Replica, writer: TraceWriter) -> None:
        self._replica, self._writer, self.sent = replica, writer, 0
        for _ in range(2):
            self.rate()

    def rate(self) -> float:
        """Return the tokens per second of one request."""
        self.sent += 1
        began = time.monotonic()
        decode(self._replica, f"request-{self.sent}", PROMPT, TOKENS)()
        return TOKENS / (time.monotonic() - began)

    def accounted(self) -> bool:
        """Return whether every request is written or counted as dropped."""
        return self.written + self.dropped == self.sent

    def best(self) -> float:
        """Return the highest rate of several requests, as other load only slows a request down."""
        return max(self.rate() for _ in range(TURNS))

    def wait_until_captured(self, within: float = HANG_SECONDS) -> float:
        """Send requests until another trace is written; return the seconds."""
        began, count = time.monotonic(), self.written
        wait_until(lambda: self.rate() and self.written > count, within)
        return time.monotonic() - began

    @property
    def written(self) -> int:
        """Number of written traces."""
        return self._writer.counters()["written"]

    @property
    def dropped(self) -> int:
        """Number of dropped traces."""
        return self._writer.counters()["dropped"]


@pytest.fixture
def traffic(replica: Replica, writers: list[TraceWriter], eventually: Callable[..., None]) -> Traffic:
    traffic = Traffic(replica, *writers)
    eventually(traffic.accounted)
    return traffic


@pytest.mark.fault(
    "Redis answers half a second late",
    "decoding keeps its speed, nothing hangs, and lost traces are counted",
)
def test_slow_redis_does_not_slow_decoding(replica, traffic, address, eventually, fault_result):
    good, slow = [], []
    for _ in range(TURNS):
        address.delay = 0.0
        time.sleep(0.2)
        good.append(traffic.rate())
        address.delay = 0.25
        time.sleep(0.2)
        slow.append(traffic.rate())
    before, now = max(good), max(slow)  # other load only slows a turn down
    print(f"tokens per second: {before:.0f}, with a slow Redis {now:.0f}")
    assert now > MIN_SPEED * before
    eventually(traffic.accounted, seconds=30)
    address.delay = 0.0
    fault_result.seconds = traffic.wait_until_captured()
    fault_result.lost = f"{traffic.dropped} of {traffic.sent} traces, counted"
    fault_result.errors = f"none; {now / before:.2f} of the tokens per second"


@pytest.mark.fault(
    "Redis has no memory left",
    "serving continues; lost traces are counted and logged once; training waits, because no replica can "
    "report its load",
)
def test_full_redis_drops_traces_and_serving_continues(replica, traffic, server, caplog, eventually, fault_result):
    caplog.set_level(logging.INFO)
    good = traffic.best()
    with redis.Redis.from_url(server.url) as client, ReplicaLoads(server.url) as loads:
        capacity = SpareCapacity(loads, TrainerSettings(), time.process_time)
        assert capacity.spare() > 0
        client.set("ballast", bytes(20 << 20))
        client.config_set("maxmemory", "10mb")
        before = traffic.dropped
        full = traffic.best()
        print(f"tokens per second: {good:.0f}, with a full Redis {full:.0f}")
        assert full > MIN_SPEED * good
        eventually(traffic.accounted)
        assert traffic.dropped >= before + TURNS
        eventually(lambda: capacity.spare() == 0, seconds=15)
        assert len([line for line in caplog.messages if line.startswith("traces are dropped")]) == 1
        lost = traffic.dropped
        client.delete("ballast")
        fault_result.seconds = traffic.wait_until_captured()
        eventually(lambda: capacity.spare() > 0)
    assert "Redis takes traces again" in caplog.text
    fault_result.lost, fault_result.errors = f"{lost} of {traffic.sent} traces, counted", "none"


@pytest.mark.fault(
    "Redis is flushed",
    "serving continues with the version in service; traces on the stream are lost, later traces are written",
)
def test_flushed_redis_gets_all_reports_again(replica, traffic, server, eventually, fault_result):
    with redis.Redis.from_url(server.url) as client, ReplicaLoads(server.url) as loads:
        lost = client.xlen("osd:traces:domain:general")
        client.flushall()
        began = time.monotonic()
        eventually(lambda: loads.read().keys() == {"a"})
        eventually(lambda: client.exists("osd:rollout:general"), seconds=5)
        traffic.rate()
        eventually(traffic.accounted)
        fault_result.seconds = time.monotonic() - began
        assert traffic.dropped == 0
        assert client.xlen("osd:traces:domain:general") > 0
        assert replica.engine.drafter_version == 1
    fault_result.lost, fault_result.errors = f"{lost} traces that were on the stream", "none"


@pytest.mark.fault(
    "Redis stops for 30 s and returns empty",
    "serving keeps its speed, lost traces are counted, and everything works again within 5 s",
)
def test_redis_outage_affects_no_request(replica, traffic, server, caplog, eventually, fault_result):
    good = traffic.best()
    eventually(traffic.accounted)
    server.close()
    down_since, rates = time.monotonic(), []
    while time.monotonic() < down_since + DOWN_SECONDS:
        rates.append(traffic.rate())
        time.sleep(0.5)
    eventually(traffic.accounted)
    lost = traffic.dropped
    assert lost == len(rates)
    for line in ("traces are dropped", "Redis does not answer, serving continues without it"):
        assert len([message for message in caplog.messages if message.startswith(line)]) == 1
    server.start()
    began = time.monotonic()
    traffic.wait_until_captured(within=5)
    with ReplicaLoads(server.url) as loads:
        eventually(lambda: loads.read().keys() == {"a"}, seconds=5)
    fault_result.seconds = time.monotonic() - began
    again, without = traffic.best(), max(rates)
    print(f"tokens per second: {good:.0f}, without Redis {without:.0f}, with the next Redis {again:.0f}")
    assert without > MIN_SPEED * min(good, again)
    fault_result.lost, fault_result.errors = f"{lost} of {traffic.sent} traces, counted", "none"
