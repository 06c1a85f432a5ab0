"""Redis is slow, full, flushed, restarted, or gone for half a minute: a replica serves on as fast as before."""

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
from tests.redis_servers import Address
from tests.replicas import PROMPT, Replicas, decode
from tests.waiting import HANG_SECONDS, wait_until
from trainer.capacity import SpareCapacity

pytestmark = pytest.mark.soak

TOKENS, TURNS = 200, 7
SLOWER = 0.4
"""Of the tokens per second with a good Redis, what is left with a bad one on a machine that others use too.

A request takes a fifth of a second: one that waited for a single answer would have less than 0.3 left.
"""
END_SECONDS = 15.0
GONE_SECONDS = 30.0


@pytest.fixture
def address(server: RedisServer) -> Iterator[Address]:
    with Address(int(server.url.rpartition(":")[2].partition("/")[0])) as address:
        yield address


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[TraceWriter]:
    """The writers of traces that replicas make."""
    made: list[TraceWriter] = []

    class Kept(TraceWriter):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("serving.replica.replica.TraceWriter", Kept)
    return made


@pytest.fixture
def replica(server: RedisServer, address: Address, writers, tiny_target, replica_settings) -> Iterator[Replica]:
    """A replica that drafts by a version, recalls, captures, and reaches Redis by the address."""
    settings = replica_settings
    first = drafting.initial(settings.drafter, tiny_target, settings.home_dir)
    Registry(settings.registry_dir).publish("general", first.weights(), first.config(), {})
    with Pointer(server.url, settings.registry_dir) as pointer:
        put(pointer, "general", Rollout(1, None, 0.0, 1.0))
    port = server.url.rpartition(":")[2].partition("/")[0]
    replicas = Replicas(settings, server.url.replace(f":{port}/", f":{address.port}/"))
    yield replicas.start("a")
    begun = time.monotonic()
    replicas.end_all()
    assert time.monotonic() - begun < END_SECONDS


class Traffic:
    """Sends requests that are captured, one after the other."""

    def __init__(self, replica: Replica, writer: TraceWriter) -> None:
        self._replica, self._writer, self.sent = replica, writer, 0
        for _ in range(2):
            self.rate()

    def rate(self) -> float:
        """Tokens per second of one request."""
        self.sent += 1
        begun = time.monotonic()
        decode(self._replica, f"request-{self.sent}", PROMPT, TOKENS)()
        return TOKENS / (time.monotonic() - begun)

    def accounted(self) -> bool:
        """Whether every request was written down or counted as dropped."""
        return self.written + self.dropped == self.sent

    def best(self) -> float:
        """The highest rate of some requests: others on the machine only make one slower."""
        return max(self.rate() for _ in range(TURNS))

    def wait_until_captured(self, within: float = HANG_SECONDS) -> float:
        """Send requests until one more is written down; returns seconds until then."""
        begun, count = time.monotonic(), self.written
        wait_until(lambda: self.rate() and self.written > count, within)
        return time.monotonic() - begun

    @property
    def written(self) -> int:
        return self._writer.counters()["written"]

    @property
    def dropped(self) -> int:
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
def test_a_slow_redis_slows_no_token(replica, traffic, address, eventually, aftermath):
    good, slow = [], []
    for _ in range(TURNS):
        address.delay = 0.0
        time.sleep(0.2)
        good.append(traffic.rate())
        address.delay = 0.25
        time.sleep(0.2)
        slow.append(traffic.rate())
    before, now = max(good), max(slow)  # others on the machine only make a turn slower
    print(f"tokens per second: {before:.0f}, with a slow Redis {now:.0f}")
    assert now > SLOWER * before
    eventually(traffic.accounted, seconds=30)
    address.delay = 0.0
    aftermath.seconds = traffic.wait_until_captured()
    aftermath.lost = f"{traffic.dropped} of {traffic.sent} traces, counted"
    aftermath.errors = f"none; {now / before:.2f} of the tokens per second"


@pytest.mark.fault(
    "Redis has no memory left",
    "serving continues; lost traces are counted and logged once; training waits, because no replica can "
    "report its load",
)
def test_a_full_redis_takes_no_traces_and_serving_goes_on(replica, traffic, server, caplog, eventually, aftermath):
    caplog.set_level(logging.INFO)
    good = traffic.best()
    with redis.Redis.from_url(server.url) as client, ReplicaLoads(server.url) as loads:
        capacity = SpareCapacity(loads, TrainerSettings(), time.process_time)
        assert capacity.spare() > 0
        client.set("foreign", bytes(20 << 20))
        client.config_set("maxmemory", "10mb")
        before = traffic.dropped
        full = traffic.best()
        print(f"tokens per second: {good:.0f}, with a full Redis {full:.0f}")
        assert full > SLOWER * good
        eventually(traffic.accounted)
        assert traffic.dropped >= before + TURNS
        eventually(lambda: capacity.spare() == 0, seconds=15)
        said = [record.getMessage() for record in caplog.records]
        assert len([line for line in said if line.startswith("traces are dropped")]) == 1
        lost = traffic.dropped
        client.delete("foreign")
        aftermath.seconds = traffic.wait_until_captured()
        eventually(lambda: capacity.spare() > 0)
    assert "Redis takes traces again" in caplog.text
    aftermath.lost, aftermath.errors = f"{lost} of {traffic.sent} traces, counted", "none"


@pytest.mark.fault(
    "Redis is flushed",
    "serving continues with the version in service; traces on the stream are lost, later traces are written",
)
def test_a_flushed_redis_is_told_all_again(replica, traffic, server, eventually, aftermath):
    with redis.Redis.from_url(server.url) as client, ReplicaLoads(server.url) as loads:
        lost = client.xlen("osd:traces:domain:general")
        client.flushall()
        begun = time.monotonic()
        eventually(lambda: loads.read().keys() == {"a"})
        eventually(lambda: client.exists("osd:rollout:general"), seconds=5)
        traffic.rate()
        eventually(traffic.accounted)
        aftermath.seconds = time.monotonic() - begun
        assert traffic.dropped == 0
        assert client.xlen("osd:traces:domain:general") > 0
        assert replica.engine.drafter_version == 1
    aftermath.lost, aftermath.errors = f"{lost} traces that were on the stream", "none"


@pytest.mark.fault(
    "Redis stops for 30 s and returns empty",
    "serving keeps its speed, lost traces are counted, and everything works again within 5 s",
)
def test_redis_that_is_gone_for_half_a_minute_is_missed_by_no_request(
    replica, traffic, server, caplog, eventually, aftermath
):
    good = traffic.best()
    eventually(traffic.accounted)
    server.close()
    gone, rates = time.monotonic(), []
    while time.monotonic() < gone + GONE_SECONDS:
        rates.append(traffic.rate())
        time.sleep(0.5)
    eventually(traffic.accounted)
    lost = traffic.dropped
    assert lost == len(rates)
    said = [record.getMessage() for record in caplog.records]
    for line in ("traces are dropped", "Redis does not answer, serving continues without it"):
        assert len([one for one in said if one.startswith(line)]) == 1
    server.start()
    begun = time.monotonic()
    traffic.wait_until_captured(within=5)
    with ReplicaLoads(server.url) as loads:
        eventually(lambda: loads.read().keys() == {"a"}, seconds=5)
    aftermath.seconds = time.monotonic() - begun
    again, without = traffic.best(), max(rates)
    print(f"tokens per second: {good:.0f}, without Redis {without:.0f}, with the next one {again:.0f}")
    assert without > SLOWER * min(good, again)
    aftermath.lost, aftermath.errors = f"{lost} of {traffic.sent} traces, counted", "none"
