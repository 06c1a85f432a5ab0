"""Trainers with canaries that are killed before each kind of write, or hang there, are replaced and resume."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.retention import retire
from osd.registry.training import Training, TrainingReports
from osd.registry.versions import Registry
from tests.faults.dying_trainer import FIRST, with_canaries
from tests.integration.test_trainer_killed import RECORDS, check_whole, prepare
from tests.killer import Killer
from tests.pointers import put, write
from tests.unit.learning.toys import Toy
from tests.waiting import HANG_SECONDS, wait_until
from trainer import checkpoint

WRITERS = (
    "versions.py", "local_storage.py", "pointer_file.py", "checkpoint.py", "training.py", "history.py", "events.py",
    "retention.py", "lease.py", "reader.py",
)  # fmt: skip
LOCKS = {".general.lock", ".general.trainer"}


@pytest.mark.soak
@pytest.mark.fault(
    "the trainer is killed before each kind of write: version, pointer, canary, checkpoint, report, history, events",
    "no partial file exists, a canary continues or is withdrawn, no record and no reported second is lost",
    process="trainer: SIGKILL",
)
def test_killed_trainer_leaves_no_partial_write(redis_url, tmp_path, fault_result):
    killer = Killer("tests.faults.dying_trainer")
    longest, killed, lost_events = 0.0, 0, 0
    with redis.Redis.from_url(redis_url) as client:
        try:
            places: dict[str, None] = {}
            for attempt in range(5):
                client.flushall()
                home = tmp_path / f"whole {attempt}"
                prepare_with_old(redis_url, home)
                places |= dict.fromkeys(killer.run(redis_url, home, signal=9, before="")["writes"])
                if not missing_of(places):
                    break
            assert not missing_of(places)
            for number, place in enumerate(places):
                client.flushall()
                home = tmp_path / str(number)
                registry = prepare_with_old(redis_url, home)
                killed += killer.run(redis_url, home, signal=9, before=place)["signal"] == 9
                check_whole(redis_url, home, registry)
                with Pointer(redis_url, registry.root) as pointer, TrainingReports(redis_url) as reports:
                    canary, cost = pointer.get("general").canary, cost_of(reports)
                began = time.monotonic()
                assert killer.run(redis_url, home, signal=9, before="")["signal"] == 0, place
                longest = max(longest, time.monotonic() - began)
                check_whole(redis_url, home, registry)
                lost_events += check_successor(redis_url, home, registry, client, canary, cost)
            assert killed > 0.8 * len(places)  # some writes happen only at another pace of the machine
        finally:
            killer.close()
    fault_result.lost = f"the event of a decision in {lost_events} of {killed} kills; nothing else"
    fault_result.errors, fault_result.seconds = "none: replicas keep their version", longest


def cost_of(reports: TrainingReports) -> float:
    """Return the reported core seconds of training."""
    return reports.get(["general"]).get("general", Training()).cost


def prepare_with_old(url, home) -> Registry:
    """Prepare a home as ``prepare`` does, with old versions for retention."""
    registry, toy = prepare(url, home), Toy()
    for _ in range(1, FIRST):
        registry.publish("general", toy.weights(), toy.config(), {})
    with Pointer(url, registry.root) as pointer:
        put(pointer, "general", Rollout(FIRST, None, 0.0, 1.0))
    return registry


def missing_of(places) -> list[str]:
    """Return the writers that made no write in the runs; the progress of a trainer depends on its pace."""
    return [writer for writer in WRITERS if not any(writer in place for place in places)]


def check_successor(url, home, registry, client, canary, cost) -> bool:
    """Check that no data is lost and the canary is decided; return whether an event is missing."""
    with Pointer(url, registry.root) as pointer, TrainingReports(url) as reports, Events(url) as events:
        rollout = pointer.get("general")
        recorded = {(event["kind"], event["version"]) for event in events.recent(steps=False)}
        # A run ends after two promotions, when the trial of a later canary may still run.
        assert canary is None or rollout.canary != canary or rollout.stable > FIRST + 1
        assert cost_of(reports) >= cost
    removed = [version.number for version in registry.removed("general")]
    numbers = sorted({*registry.numbers("general"), *removed})
    assert numbers == list(range(1, numbers[-1] + 1))
    for number in numbers[FIRST:]:
        assert ("canary", number) in recorded
    (group,) = client.xinfo_groups("osd:traces:domain:general")
    assert group["pending"] == 0
    _, saved = checkpoint.load(with_canaries(home).home_dir / "trainer" / "general.safetensors")
    counters = saved["counters"]
    assert counters["trained"] + counters["held_out"] >= RECORDS
    check_next_writes_leave_nothing(registry, rollout)
    return not all(
        {("promoted", number), ("rolled_back", number)} & recorded for number in range(FIRST + 1, rollout.stable + 1)
    )


def check_next_writes_leave_nothing(registry, rollout) -> None:
    """Check that the next writes remove the leftovers of a killed process."""
    files, newest = PointerFiles(registry.root), registry.load("general", rollout.stable)
    registry.begin("general", {})
    registry.finish("general")
    for _ in range(2):
        registry.publish("general", newest.weights, newest.config, {})
    retire(registry, "general", 1, files.locked("general"))
    write(files, "general", rollout)
    for folder in (registry.root, registry.root / "general", registry.root.parent / "trainer"):
        assert {entry.name for entry in folder.iterdir() if entry.name.startswith(".")} <= LOCKS


@pytest.fixture(scope="module")
def trainers(redis_url, tmp_path_factory) -> Iterator[tuple[Killer, Killer, list[str]]]:
    first, second = Killer("tests.faults.dying_trainer"), Killer("tests.faults.dying_trainer")
    home = tmp_path_factory.mktemp("whole")
    prepare_with_old(redis_url, home)
    yield first, second, second.run(redis_url, home, signal=0, before="")["writes"]
    first.close()
    second.close()


def state(client: redis.Redis, home: Path) -> dict[str, Any]:
    """Return the files without locks and parts, and what Redis stores of rollout, training and events."""
    paths = sorted(path for path in home.rglob("[!.]*") if path.is_file())
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    keys = {name: client.dump(name) for name in ("osd:rollout:general", "osd:training:general", "osd:events")}
    return {**files, **keys, "pending": client.xinfo_groups("osd:traces:domain:general")[0]["pending"]}


def stopped(parent: int) -> psutil.Process:
    """Return the trainer that stopped itself."""
    children = psutil.Process(parent).children
    return wait_until(lambda: next((child for child in children() if child.status() == psutil.STATUS_STOPPED), None))


@pytest.mark.soak
@pytest.mark.fault(
    "a trainer hangs while it writes, another trainer takes over, and the first resumes",
    "the first ends with a log line, and changes no version, pointer, checkpoint, report or event",
    process="trainer: SIGSTOP, later SIGCONT",
)
@pytest.mark.parametrize(
    ("operation", "file"),
    [("fsync", "checkpoint.py"), ("fsync", "versions.py"), ("os.mkdir", "versions.py"), ("XACK", "reader.py")],
    ids=["a checkpoint", "an intention", "a version", "acknowledgements"],
)
def test_trainer_that_hung_during_a_write_changes_nothing(trainers, redis_url, tmp_path, fault_result, operation, file):
    first, second, places = trainers
    before = next(place for place in places if place.startswith(operation) and file in place)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        registry, answers = prepare_with_old(redis_url, tmp_path), []
        hanging = threading.Thread(
            target=lambda: answers.append(first.run(redis_url, tmp_path, signal=int(signal.SIGSTOP), before=before))
        )
        hanging.start()
        victim = stopped(first.process.pid)
        began = time.monotonic()
        try:
            successor = second.run(redis_url, tmp_path, signal=0, before="")
            fault_result.seconds = time.monotonic() - began
            assert not successor["lost"]
            assert PointerFiles(registry.root).read("general").fence == 2
            before_resume = state(client, tmp_path)
        finally:
            victim.resume()
            hanging.join(HANG_SECONDS)
        assert state(client, tmp_path) == before_resume
    ((_, _, lost),) = [answer.values() for answer in answers]
    assert lost == "another trainer has taken over general: its number is 2, and this trainer, number 1, ends"
    check_whole(redis_url, tmp_path, registry)
    fault_result.lost, fault_result.errors = "nothing", "none: replicas keep their version"
