"""The wall clock of all processes is set while they run: waits, expiry and purges follow the elapsed time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from osd.capture.server import RedisServer
from osd.config import Settings
from osd.drafting.recall.snapshot import Snapshots
from osd.recall.backends import backend
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry
from tests.faults.wall_clock import WallClock, moving
from tests.killer import Killer
from tests.pointers import put
from tests.unit.learning.toys import Toy
from tests.up import Up, starting
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.soak

of_trainers = pytest.mark.fault(
    "the clock of trainers jumps by an hour, forward and back",
    "canaries and leases follow the elapsed time",
    process="trainer, redis-server: the wall clock of all processes is set",
)
of_a_service = pytest.mark.fault(
    "the clock of a service jumps by an hour, forward and back",
    "purges and the age of recall's entries follow the elapsed time",
    process="osd up, replica, redis-server: the wall clock of all processes is set",
)
HOUR = 3600
CANARY_SECONDS, LOOKS_SECONDS = 15.0, 3.0
"""Time limit of a canary, and time in which a trainer sees it, or a lease."""
ADMIN_KEY = "sk-operators"
both_ways = pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["forwards", "backwards"])


@pytest.fixture(scope="module")
def clock(tmp_path_factory) -> Iterator[WallClock]:
    with moving(tmp_path_factory.mktemp("clock")) as clock:
        yield clock


@pytest.fixture(scope="module")
def redis_url(clock: WallClock) -> Iterator[str]:
    with RedisServer(64) as server:
        yield server.url


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("service") / "home"


@pytest.fixture(scope="module")
def service(home: Path, clock: WallClock) -> Iterator[Up]:
    """Service with a replica, a trainer and recall."""
    key_file = home.parent / "admin-key"
    key_file.write_text(ADMIN_KEY)
    settings = {
        "drafter.kind": "mixed",
        "drafter.trained.vocabulary": 128,
        "growth.governed": "false",  # drafts do not pay on a tiny target
        "serving.admin_key_file": key_file,
    }
    with starting(home.parent, replicas=1, **settings) as up:
        yield up


@pytest.fixture
def trainers(redis_url: str, tmp_path: Path) -> Iterator[Trainers]:
    """Home with two versions of a domain, for up to two trainers of toys."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    trainers = Trainers(redis_url, tmp_path)
    yield trainers
    trainers.end_all()


class Trainers:
    """Starter of trainers of the same domain."""

    def __init__(self, url: str, home: Path) -> None:
        trainer: Any = {"canary_seconds": CANARY_SECONDS}
        self._settings = Settings(home=home, target={"source": "toy"}, trainer=trainer)  # type: ignore[arg-type]
        self._url, self._running = url, list[Killer]()
        registry, toy = Registry(self._settings.registry_dir), Toy()
        for _ in range(2):
            registry.publish("general", toy.weights(), toy.config(), {})

    def start(self) -> Killer:
        """Start a trainer."""
        killer = Killer("tests.faults.toy_trainer", self._url, self._settings.model_dump_json())
        self._running.append(killer)
        return killer

    def put(self, rollout: Rollout) -> None:
        """Move the pointer."""
        with Pointer(self._url, self._settings.registry_dir) as pointer:
            put(pointer, "general", rollout)

    def rollout(self) -> Rollout:
        """Return the rollout on the disk."""
        rollout = PointerFiles(self._settings.registry_dir).read("general")
        assert rollout is not None
        return rollout

    def end_all(self) -> None:
        """Resume and end the trainers."""
        for killer in self._running:
            killer.process.send_signal(signal.SIGCONT)
            killer.close()


@of_trainers
@both_ways
def test_canary_lasts_its_elapsed_time(trainers, clock, jump, eventually, fault_result):
    trainers.start()
    began = time.monotonic()
    trainers.put(Rollout(1, 2, 0.5, clock.now()))
    eventually(lambda: trainers.rollout().fence == 1)
    time.sleep(LOOKS_SECONDS)
    clock.jump(jump)
    eventually(lambda: trainers.rollout().canary is None)
    assert time.monotonic() - began > CANARY_SECONDS - 1
    fault_result.lost = "nothing"


@of_trainers
def test_canary_ends_after_the_clock_was_set_back(trainers, clock, eventually, fault_result):
    trainers.start()
    now = clock.now()
    clock.jump(-HOUR)
    trainers.put(Rollout(1, 2, 0.5, now))
    eventually(lambda: trainers.rollout().canary is None)
    clock.jump(HOUR)
    fault_result.lost = "nothing"


@of_trainers
def test_lease_stays_when_the_clock_is_set_forward(trainers, clock, eventually, fault_result):
    trainers.start()
    trainers.put(Rollout(1, None, 0.0, clock.now()))
    eventually(lambda: trainers.rollout().fence == 1)
    trainers.start()
    time.sleep(LOOKS_SECONDS)
    clock.jump(HOUR)
    time.sleep(LOOKS_SECONDS)
    assert trainers.rollout().fence == 1, "the first trainer lives"
    clock.jump(-HOUR)
    fault_result.lost = "nothing"


@of_trainers
def test_lease_of_a_hanging_trainer_expires_after_a_jump_back(trainers, clock, eventually, fault_result):
    first = trainers.start()
    trainers.put(Rollout(1, None, 0.0, clock.now()))
    eventually(lambda: trainers.rollout().fence == 1)
    trainers.start()
    time.sleep(LOOKS_SECONDS)
    first.process.send_signal(signal.SIGSTOP)
    clock.jump(-HOUR)
    began = time.monotonic()
    eventually(lambda: trainers.rollout().fence == 2)
    fault_result.lost, fault_result.seconds = "nothing", time.monotonic() - began
    clock.jump(HOUR)


@of_a_service
@both_ways
def test_purge_removes_entries_from_before_the_jump(service, clock, jump, eventually, fault_result):
    written = service.metric("osd_traces_written_total")
    request = service.complete(prompt=f"purged {jump}", max_tokens=100).json()["id"]
    eventually(lambda: service.metric("osd_traces_written_total") > written)
    clock.jump(jump)
    answer = httpx2.post(
        f"{service.url}/admin/traces/purge",
        json={"request": request},
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    removed = answer.json()
    assert removed["entries"] > 0
    assert removed["streamed"] + removed["remembered"] > 0
    assert removed["absent"] == []
    fault_result.lost = "only the purged request"


@of_a_service
def test_entries_after_a_backward_jump_are_not_older(service, home, clock, eventually, fault_result):
    """A full table drops the entries with the oldest renewal."""
    began = int(clock.now())
    service.complete(prompt="before", max_tokens=100)
    eventually(lambda: service.metric("osd_recall_entries") > 0)
    clock.jump(-HOUR)
    service.complete(prompt="after", max_tokens=100)
    service.process.send_signal(signal.SIGTERM)
    service.process.communicate(timeout=HANG_SECONDS)  # a replica writes its table when it ends
    snapshots = Snapshots(home / "registry")
    about = snapshots.about("general")
    assert about is not None
    table = backend().memory(about.entries)
    snapshots.restore("general", table, about.target)
    assert table.used() > 0
    assert table.drop(before=began) == 0
    fault_result.lost = "nothing"
