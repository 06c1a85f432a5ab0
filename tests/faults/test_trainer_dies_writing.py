"""A trainer with canaries is killed before each kind of write, or hangs there, is replaced, and goes on."""

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
)
def test_killed_before_any_write_it_leaves_nothing_half_done_and_a_successor_goes_on(redis_url, tmp_path, aftermath):
    killer = Killer("tests.faults.dying_trainer")
    longest, killed, untold = 0.0, 0, 0
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
                    on_trial, spent = pointer.get("general").canary, cost_of(reports)
                begun = time.monotonic()
                assert killer.run(redis_url, home, signal=9, before="")["signal"] == 0, place
                longest = max(longest, time.monotonic() - begun)
                check_whole(redis_url, home, registry)
                untold += check_successor(redis_url, home, registry, client, on_trial, spent)
            assert killed > 0.8 * len(places)  # a few come only where others take their time
        finally:
            killer.close()
    aftermath.lost = f"the event of a decision in {untold} of {killed} kills; nothing else"
    aftermath.errors, aftermath.seconds = "none: replicas keep their version", longest


def cost_of(reports: TrainingReports) -> float:
    """Reported core seconds of training."""
    return reports.get(["general"]).get("general", Training()).cost


def prepare_with_old(url, home) -> Registry:
    """As ``prepare``, with versions that are to be removed."""
    registry, toy = prepare(url, home), Toy()
    for _ in range(1, FIRST):
        registry.publish("general", toy.weights(), toy.config(), {})
    with Pointer(url, registry.root) as pointer:
        put(pointer, "general", Rollout(FIRST, None, 0.0, 1.0))
    return registry


def missing_of(places) -> list[str]:
    """What of all that writes was not seen to write: how far a trainer comes depends on its pace."""
    return [writer for writer in WRITERS if not any(writer in place for place in places)]


def check_successor(url, home, registry, client, on_trial, spent) -> bool:
    """What was there is there, what was on trial is decided on; whether an event is missing."""
    with Pointer(url, registry.root) as pointer, TrainingReports(url) as reports, Events(url) as events:
        rollout, told = pointer.get("general"), {(one["kind"], one["version"]) for one in events.recent(steps=False)}
        # A run ends when it has promoted two: later canaries may still be on trial then.
        assert on_trial is None or rollout.canary != on_trial or rollout.stable > FIRST + 1
        assert cost_of(reports) >= spent
    gone = [one.number for one in registry.removed("general")]
    numbers = sorted({*registry.numbers("general"), *gone})
    assert numbers == list(range(1, numbers[-1] + 1))
    for number in numbers[FIRST:]:
        assert ("canary", number) in told
    (group,) = client.xinfo_groups("osd:traces:domain:general")
    assert group["pending"] == 0
    found = checkpoint.load(with_canaries(home).home_dir / "trainer" / "general.safetensors")
    counters = found[1]["counters"]
    assert counters["trained"] + counters["held_out"] >= RECORDS
    check_next_writes_leave_nothing(registry, rollout)
    return not all(
        {("promoted", number), ("rolled_back", number)} & told for number in range(FIRST + 1, rollout.stable + 1)
    )


def check_next_writes_leave_nothing(registry, rollout) -> None:
    """What a killed process left is gone as soon as the same is written again."""
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
    """What is on disk but for locks and parts, and what Redis has of it and of the report of training."""
    paths = sorted(path for path in home.rglob("[!.]*") if path.is_file())
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    kept = {name: client.dump(name) for name in ("osd:rollout:general", "osd:training:general", "osd:events")}
    return {**files, **kept, "pending": client.xinfo_groups("osd:traces:domain:general")[0]["pending"]}


def stopped(parent: int) -> psutil.Process:
    """The trainer that stopped itself."""
    children = psutil.Process(parent).children
    return wait_until(lambda: next((one for one in children() if one.status() == psutil.STATUS_STOPPED), None))


@pytest.mark.soak
@pytest.mark.fault(
    "a trainer hangs while it writes, another trainer takes over, and the first resumes",
    "the first ends with a log line, and changes no version, pointer, checkpoint, report or event",
)
@pytest.mark.parametrize(
    ("what", "where"),
    [("fsync", "checkpoint.py"), ("fsync", "versions.py"), ("os.mkdir", "versions.py"), ("XACK", "reader.py")],
    ids=["a checkpoint", "an intention", "a version", "acknowledgements"],
)
def test_a_trainer_that_hung_while_it_wrote_ends_and_changes_nothing(
    trainers, redis_url, tmp_path, aftermath, what, where
):
    first, second, places = trainers
    before = next(place for place in places if place.startswith(what) and where in place)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        registry, answers = prepare_with_old(redis_url, tmp_path), []
        hanging = threading.Thread(
            target=lambda: answers.append(first.run(redis_url, tmp_path, signal=int(signal.SIGSTOP), before=before))
        )
        hanging.start()
        victim = stopped(first.process.pid)
        begun = time.monotonic()
        try:
            successor = second.run(redis_url, tmp_path, signal=0, before="")
            aftermath.seconds = time.monotonic() - begun
            assert not successor["lost"]
            assert PointerFiles(registry.root).read("general").fence == 2
            whole = state(client, tmp_path)
        finally:
            victim.resume()
            hanging.join(HANG_SECONDS)
        assert state(client, tmp_path) == whole
    ((_, _, lost),) = [answer.values() for answer in answers]
    assert lost == "another trainer has taken over general: its number is 2, and this trainer, number 1, ends"
    check_whole(redis_url, tmp_path, registry)
    aftermath.lost, aftermath.errors = "nothing", "none: replicas keep their version"
