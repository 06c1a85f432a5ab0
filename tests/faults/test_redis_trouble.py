"""Redis is slow, full, flushed, restarted, or down for half a minute: a service keeps its speed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from osd.capture.server import RedisServer
from osd.config import TrainerSettings
from osd.registry.replica_loads import ReplicaLoads
from tests.redis_servers import TcpProxy
from tests.up import Up, starting
from tests.waiting import HANG_SECONDS, wait_until
from trainer.capacity import SpareCapacity

pytestmark = pytest.mark.soak

TOKENS, TURNS = 300, 15
MIN_SPEED = 0.9
HANGING = 0.1
"""Share of the speed below which a request hung."""
"""Lowest share of the speed with a good Redis that a bad Redis may leave."""
DOWN_SECONDS = 30.0


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """Redis that a test may stop and start again."""
    with RedisServer(64) as server:
        yield server


@pytest.fixture(scope="module")
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture(scope="module")
def address(redis_url: str) -> Iterator[TcpProxy]:
    """Proxy between the service and its Redis."""
    with TcpProxy(urlsplit(redis_url).port) as address:
        yield address


class Traffic:
    """Sender of captured requests to a service, one after the other."""

    def __init__(self, service: Up, log: Path) -> None:
        self._service, self._log = service, log
        self._sent = self._since = self._dropped_before = 0
        for _ in range(3):
            self.rate()

    def settle(self) -> None:
        """Wait until every request is accounted, and count the dropped traces and the lines of the log from now on."""
        wait_until(self.accounted, every=0.1)
        self._dropped_before, self._since = self._dropped(), len(self._log.read_text())

    def rate(self, tokens: int = TOKENS) -> float:
        """Return the tokens per second of one request."""
        self._sent += 1
        began = time.monotonic()
        assert self._service.complete(max_tokens=tokens).status_code == 200
        return tokens / (time.monotonic() - began)

    def best(self) -> float:
        """Return the highest rate of several requests, as other load only slows a request down."""
        return max(self.rate() for _ in range(TURNS))

    def accounted(self) -> bool:
        """Return whether every request is written or counted as dropped."""
        return self.written() + self._dropped() == self._sent

    def wait_until_captured(self, within: float = HANG_SECONDS) -> float:
        """Send short requests until another trace is written; return the seconds."""
        began, count = time.monotonic(), self.written()
        wait_until(lambda: self.rate(tokens=2) and self.written() > count, within)
        return time.monotonic() - began

    def written(self) -> int:
        """Return the number of written traces."""
        return int(self._service.metric("osd_traces_written_total"))

    def dropped(self) -> int:
        """Return the number of traces that were dropped since the last ``settle``."""
        return self._dropped() - self._dropped_before

    def _dropped(self) -> int:
        return int(self._service.metric("osd_traces_dropped_total"))

    def messages(self, start: str) -> list[str]:
        """Return the messages since the last ``settle`` that begin with ``start``."""
        lines = self._log.read_text()[self._since :].splitlines()
        messages = [json.loads(line)["message"] for line in lines]
        return [message for message in messages if message.startswith(start)]


@pytest.fixture(scope="module")
def service(tmp_path_factory, redis_url: str, address: TcpProxy) -> Iterator[tuple[Up, Path]]:
    """Service with one replica that drafts with a version, captures, and reaches Redis through the proxy."""
    folder = tmp_path_factory.mktemp("service")
    password = folder / "password"
    password.write_text(urlsplit(redis_url).password or "")
    settings = {
        "redis_url": f"redis://127.0.0.1:{address.port}/0",
        "redis.password_file": password,
        "drafter.kind": "language_model",
        "drafter.layers": 1,
        "growth.governed": "false",  # a constant plan, so that only Redis changes the speed
        "trainer.enabled": "false",
        "log.format": "json",
        "log.file": folder / "log.jsonl",
    }
    with starting(folder, replicas=1, **settings) as up:
        yield up, folder / "log.jsonl"


@pytest.fixture(scope="module")
def sender(service: tuple[Up, Path]) -> Traffic:
    return Traffic(*service)


@pytest.fixture
def traffic(sender: Traffic) -> Traffic:
    """Traffic whose earlier requests are all accounted."""
    sender.settle()
    return sender


@pytest.mark.fault(
    "Redis answers half a second late",
    "decoding keeps its speed, nothing hangs, and lost traces are counted",
    process="replica, redis-server: a proxy delays each transfer by 0.25 s",
)
def test_slow_redis_does_not_slow_decoding(traffic, address, fault_result):
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
    assert min(slow) > HANGING * now
    wait_until(traffic.accounted, every=0.1)
    address.delay = 0.0
    fault_result.seconds = traffic.wait_until_captured()
    fault_result.lost = f"{traffic.dropped()} of {2 * TURNS} traces, counted"
    fault_result.errors = f"none; {now / before:.2f} of the tokens per second"


@pytest.mark.fault(
    "Redis has no memory left",
    "serving continues; lost traces are counted and logged once; training waits, because no replica can "
    "report its load",
    process="replica, redis-server: its maxmemory is reached",
)
def test_full_redis_drops_traces_and_serving_continues(traffic, redis_url, eventually, fault_result):
    good = traffic.best()
    traffic.settle()
    with redis.Redis.from_url(redis_url) as client, ReplicaLoads(redis_url) as loads:
        capacity, limit = SpareCapacity(loads, TrainerSettings(), time.process_time), client.config_get("maxmemory")
        assert capacity.spare() > 0
        client.set("ballast", bytes(20 << 20))
        client.config_set("maxmemory", "10mb")
        full = traffic.best()
        eventually(traffic.accounted)
        assert traffic.dropped() == TURNS
        eventually(lambda: capacity.spare() == 0)
        assert len(traffic.messages("traces are dropped")) == 1
        client.delete("ballast")
        client.config_set("maxmemory", limit["maxmemory"])
        fault_result.seconds = traffic.wait_until_captured()
        eventually(lambda: capacity.spare() > 0)
    eventually(lambda: traffic.messages("Redis takes traces again"))
    again = traffic.best()
    print(f"tokens per second: {good:.0f}, with a full Redis {full:.0f}, afterwards {again:.0f}")
    assert full > MIN_SPEED * min(good, again)
    fault_result.lost, fault_result.errors = f"{TURNS} of {TURNS} traces, counted", "none"


@pytest.mark.fault(
    "Redis is flushed",
    "serving continues with the version in service; traces on the stream are lost, later traces are written",
    process="replica, redis-server: FLUSHALL",
)
def test_flushed_redis_gets_all_reports_again(service, traffic, redis_url, eventually, fault_result):
    with redis.Redis.from_url(redis_url) as client, ReplicaLoads(redis_url) as loads:
        lost, names = client.xlen("osd:traces:domain:general"), loads.read().keys()
        assert lost > 0
        client.flushall()
        began = time.monotonic()
        eventually(lambda: loads.read().keys() == names)
        eventually(lambda: client.exists("osd:rollout:general"))
        traffic.rate()
        eventually(traffic.accounted)
        fault_result.seconds = time.monotonic() - began
        assert traffic.dropped() == 0
        assert client.xlen("osd:traces:domain:general") > 0
        assert set(service[0].versions().values()) == {1}
    fault_result.lost, fault_result.errors = f"{lost} traces that were on the stream", "none"


@pytest.mark.fault(
    "Redis stops for 30 s and returns empty",
    "serving keeps its speed, lost traces are counted, and everything works again within 5 s",
    process="replica, redis-server: SIGTERM, a new process after 30 s",
)
def test_redis_outage_affects_no_request(traffic, redis_server, eventually, fault_result):
    good = traffic.best()
    traffic.settle()
    redis_server.close()
    down_since, rates = time.monotonic(), []
    while time.monotonic() < down_since + DOWN_SECONDS:
        rates.append(traffic.rate())
    eventually(traffic.accounted)
    lost = traffic.dropped()
    assert lost == len(rates)
    for line in ("traces are dropped", "Redis does not answer, serving continues without it"):
        assert len(traffic.messages(line)) == 1
    redis_server.start()
    began = time.monotonic()
    traffic.wait_until_captured(within=5)
    with ReplicaLoads(redis_server.url) as loads:
        eventually(loads.read, seconds=5)
    fault_result.seconds = time.monotonic() - began
    again, without = traffic.best(), max(rates)
    print(f"tokens per second: {good:.0f}, without Redis {without:.0f}, with the next Redis {again:.0f}")
    assert without > MIN_SPEED * min(good, again)
    assert min(rates) > HANGING * without
    fault_result.lost, fault_result.errors = f"{lost} of {lost} traces, counted", "none"
