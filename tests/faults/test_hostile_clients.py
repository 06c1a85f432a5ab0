"""Hostile clients attack ``osd up`` in some blocks of time, while other clients use it at a constant rate.

The environment variable ``OSD_TEST_MINUTES`` sets the length. Latencies vary too much in a short run, and the allocator
holds more and more freed memory during the first minutes. So only runs of ``LONG_MINUTES`` check the latencies, and
the memory strictly.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import httpx2
import psutil
import pytest
import yaml

from osd.capture.reader import TraceReader
from osd.capture.server import RedisServer
from osd.capture.streams import group_of
from osd.config import CaptureSettings
from tests.command import family
from tests.e2e.generated import for_each_request
from tests.faults import hostile_clients
from tests.up import SLOTS, Up, starting
from tests.waiting import HANG_SECONDS, background, wait_until

MINUTES = float(os.environ.get("OSD_TEST_MINUTES", "3"))
LONG_MINUTES = 30
BLOCK_SECONDS, PAUSE_SECONDS = 15, 3
SETTLE_SECONDS = 75 if MINUTES >= LONG_MINUTES else 15
"""Time until requests that had to wait are answered, and in long runs until freed memory is given back."""
GENERATED_REQUESTS = 500
FORMS = 100
"""Forms that fill the caches of both replicas, which hold up to 25 each."""
LONG_PROMPTS = 150
"""Refused prompts of 16 KiB that fill the proxy's index of the beginnings of prompts."""
LOAD = 0.5
"""Rate of the normal clients, as a share of the rate that the service can answer during attacks."""
WARM_MINUTES = min(MINUTES / 2, 10)
"""Time before the memory is measured for the first time."""
MAX_GROWTH, MAX_SLOWDOWN = 1.02 if MINUTES >= LONG_MINUTES else 1.1, 1.5
PROCESSES = ("ServeReplica", "ProxyActor", "ServeController", "MetricsActor")
NORMAL, HOSTILE = "sk-normal-1", "sk-hostile-1"
KEYS = [
    {"name": "normal", "key": NORMAL, "may": ["generate", "watch"]},
    {"name": "hostile", "key": HOSTILE, "priority": 100, "requests_per_minute": 300, "tokens_per_minute": 6_000},
]
OPTIONS = {"serving.max_queue": 64, "drafter.kind": "recall", "drafter.recall.megabytes": 1}


class Answer(NamedTuple):
    """Answer to a normal client, with the time at which its request was due and the seconds from then on."""

    due: float
    status: int
    seconds: float
    id: str


class NormalClients:
    """Clients that send chat requests at a constant rate, also while earlier requests wait."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, headers={"authorization": f"Bearer {NORMAL}"}, timeout=HANG_SECONDS)
        self._stopping = threading.Event()
        self.answers: list[Answer] = []

    def measure_capacity(self) -> float:
        """Return the requests per second that the service answers to as many clients as it has slots."""
        count, began = 40 * SLOTS, time.monotonic()
        with ThreadPoolExecutor(2 * SLOTS) as pool:
            assert {answer.status for answer in pool.map(self._request, [0.0] * count)} == {200}
        return count / (time.monotonic() - began)

    def run(self, rate: float) -> None:
        """Send requests until ``stop``, and wait for the answers."""
        due = time.monotonic()
        with closing(self._http), ThreadPoolExecutor(8 * SLOTS) as pool:
            while not self._stopping.wait(max(0.0, due - time.monotonic())):
                pool.submit(lambda due=due: self.answers.append(self._request(due)))
                due += 1 / rate

    def stop(self) -> None:
        """Let ``run`` end."""
        self._stopping.set()

    def _request(self, due: float) -> Answer:
        text = f"Hello {random.randrange(50)}"  # noqa: S311
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        try:
            answer = self._http.post("/v1/chat/completions", json=body)
        except httpx2.HTTPError:
            return Answer(due, 0, math.inf, "")
        seconds = time.monotonic() - due if answer.status_code == 200 else math.inf
        return Answer(due, answer.status_code, seconds, answer.json().get("id", ""))


class Watch:
    """Watch over ``/health``, and reader of the traces in place of a trainer."""

    def __init__(self, up: Up, reader: TraceReader) -> None:
        self._up, self._reader, self._stopping = up, reader, threading.Event()
        self.health: Counter[int] = Counter()
        self.captured: set[str] = set()

    def watch_health(self) -> None:
        """Call ``/health`` twice a second until ``stop``."""
        while not self._stopping.wait(0.5):
            self.health[httpx2.get(f"{self._up.url}/health", timeout=HANG_SECONDS).status_code] += 1

    def read_traces(self) -> None:
        """Read and acknowledge traces until ``stop``."""
        while not self._stopping.is_set():
            batch = self._reader.read(256, block_ms=200)
            self._reader.ack([delivery.place for delivery in batch])
            self.captured.update(delivery.record.request_id for delivery in batch)

    def stop(self) -> None:
        """Let both end."""
        self._stopping.set()


class Attackers:
    """Starter of the process of hostile clients, with the number of its connections by attack and status."""

    def __init__(self, up: Up, requests: Path) -> None:
        self._order = {"port": up.port, "ports": listening_ports(up), "key": HOSTILE, "requests": str(requests)}
        self._runs = 0
        self.statuses: Counter[str] = Counter()

    def attack(self, began: Callable[[], None] = lambda: None) -> None:
        """Attack during a block; ``began`` is called when the process has started and attacks."""
        self._runs += 1
        command = [sys.executable, "-m", hostile_clients.__name__]
        root = Path(__file__).parents[2]
        with subprocess.Popen(command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            time.sleep(PAUSE_SECONDS)  # the start of a process also takes time from other clients
            print(json.dumps({**self._order, "seed": self._runs}), file=process.stdin, flush=True)
            began()
            time.sleep(BLOCK_SECONDS)
            report, _ = process.communicate(timeout=HANG_SECONDS)
        self.statuses.update(json.loads(report))


def listening_ports(up: Up) -> list[int]:
    """Return the TCP ports on which the processes of a service listen."""
    connections = [connection for process in family(up.process.pid) for connection in process.net_connections("tcp")]
    return sorted({connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN})


def write_generated_requests(file: Path) -> None:
    """Write the generated requests that hostile clients send."""
    generated = []
    for_each_request(GENERATED_REQUESTS, lambda sent: generated.append((sent.data.decode("latin-1"), sent.end)))
    file.write_text(json.dumps(generated))


def fill(up: Up) -> None:
    """Use all slots over their whole length, and fill the caches of forms and of the beginnings of prompts."""
    chance = random.Random(0)  # noqa: S311
    forms = [{"choice": hostile_clients.choices(chance)} for _ in range(FORMS)]
    bodies = [{"prompt": f"{number}" * 450, "max_tokens": 100} for number in range(10, 10 + 4 * SLOTS)]
    bodies += [
        {"prompt": f"{number}", "structured_outputs": form, "ignore_eos": False} for number, form in enumerate(forms)
    ]
    with ThreadPoolExecutor(2 * SLOTS) as pool:
        assert {answer.status_code for answer in pool.map(lambda body: up.complete(**body), bodies)} == {200}
        prompts = [f"{number:04} " * (2**14 // 5 + 1) for number in range(LONG_PROMPTS)]
        assert {answer.status_code for answer in pool.map(lambda prompt: up.complete(prompt=prompt), prompts)} == {400}


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def memory_of(up: Up) -> dict[int, int]:
    """Return the resident bytes of each process when all slots and caches are full."""
    fill(up)
    time.sleep(SETTLE_SECONDS)
    return {process.pid: process.memory_info().rss for kind in PROCESSES for process in up.workers(kind)}


@pytest.fixture
def reader(monkeypatch):
    """Reader of the traces of the service that a test starts."""
    with RedisServer(256) as server:
        monkeypatch.setenv("OSD_REDIS_URL", server.url)
        with closing(TraceReader(server.url, CaptureSettings(), "general", group_of("general"), "test")) as reader:
            yield reader


@pytest.fixture
def service(tmp_path, reader):
    """Service with a key for normal clients and a limited key for hostile clients."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump(KEYS))
    keys.chmod(0o600)
    with starting(tmp_path, key=NORMAL, **{"serving.keys_file": keys, **OPTIONS}) as up:
        yield up


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 1800)
@pytest.mark.fault(
    "clients with a limited key send broken, nested, huge and endless requests and heads, costly forms, bombs and new "
    "domains, do not read, reset, and hold 1,000 idle connections",
    "no process is replaced, /health answers 200, no replica, proxy or actor grows by over 2 % (10 % in a run of three "
    "minutes), all traces of other clients are captured, and the 99th percentile of their latencies is at most 1.5 "
    "times as long (not checked in three minutes)",
    process="replica, proxy: hostile clients",
)
def test_hostile_clients_do_not_harm_others(service, reader, tmp_path, fault_result):
    requests = tmp_path / "requests.json"
    write_generated_requests(requests)
    fill(service)
    started = {process.pid for kind in PROCESSES for process in service.workers(kind)}
    normal, watch, attackers = NormalClients(service.url), Watch(service, reader), Attackers(service, requests)
    with background(attackers.attack, lambda: None):
        rate = LOAD * normal.measure_capacity()
    before: dict[int, int] = {}
    blocks: dict[bool, list[float]] = {True: [], False: []}  # begins, by whether hostile clients attack
    began = time.monotonic()
    with background(watch.watch_health, watch.stop), background(watch.read_traces, watch.stop):
        with background(lambda: normal.run(rate), normal.stop):
            while (minutes := (time.monotonic() - began) / 60) < MINUTES:
                if minutes > WARM_MINUTES and not before:
                    before = memory_of(service)
                    wait_until(lambda: normal.answers[-1].seconds < 1, what="the end of the backlog")
                for is_hostile in random.sample([True, False], 2):
                    if is_hostile:
                        attackers.attack(lambda: blocks[True].append(time.monotonic()))
                    else:
                        time.sleep(PAUSE_SECONDS)  # until the effects of the last block have ended
                        blocks[False].append(time.monotonic())
                        time.sleep(BLOCK_SECONDS)
            after = memory_of(service)
        names = {f"{answer.id}-0" for answer in normal.answers if answer.status == 200}
        with suppress(AssertionError):
            wait_until(lambda: names <= watch.captured, 60)

    seconds = {
        is_hostile: [
            answer.seconds for answer in normal.answers if any(0 <= answer.due - at < BLOCK_SECONDS for at in begins)
        ]
        for is_hostile, begins in blocks.items()
    }
    slowdown = percentile(seconds[True], 0.99) / percentile(seconds[False], 0.99)
    growths = [after[pid] / before[pid] for pid in before if pid in after]
    lost = len(names - watch.captured)
    print(f"load of the machine {os.getloadavg()}, {rate:.0f} requests per second, attacks: {dict(attackers.statuses)}")
    for is_hostile, values in seconds.items():
        shares = ", ".join(f"p{100 * share:g} {percentile(values, share):.3f} s" for share in (0.5, 0.9, 0.99))
        print(f"{'with' if is_hostile else 'without'} hostile clients: {len(values)} requests, {shares}")
    for pid, size in before.items():
        print(f"memory of {pid}: {size >> 20} MiB, then {after.get(pid, 0) >> 20} MiB")
    fault_result.lost = f"{lost} of {len(names)} traces; memory " + ", ".join(f"{ratio - 1:+.1%}" for ratio in growths)
    fault_result.errors = (
        f"none in {MINUTES:g} minutes with {attackers.statuses.total()} attacks; p99 {slowdown:.2f} times as long"
    )

    assert started == before.keys() == after.keys()
    assert watch.health.keys() == {200}
    assert {answer.status for answer in normal.answers} == {200}
    assert not [status for status in attackers.statuses if status.endswith((" 500", " 501", " 502"))]
    assert lost == 0
    for attack in ("complex_forms 2", "new_domains 2"):
        assert any(status.startswith(attack) for status in attackers.statuses), "hostile clients are served too"
    assert max(growths) <= MAX_GROWTH
    if MINUTES >= LONG_MINUTES:
        assert slowdown <= MAX_SLOWDOWN
