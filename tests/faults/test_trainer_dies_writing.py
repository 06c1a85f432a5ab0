"""A trainer with canaries is killed before each kind of write that it makes, one after the other."""

from __future__ import annotations

import time

import pytest
import redis

from osd.capture.server import RedisServer
from osd.registry.events import Events
from osd.registry.ledger import Ledger
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.retention import retire
from osd.registry.versions import Registry
from tests.faults.dying_trainer import FIRST, with_canaries
from tests.integration.test_trainer_killed import RECORDS, check_whole, prepare
from tests.killer import Killer
from tests.pointers import put, write
from tests.unit.learning.toys import Toy
from trainer import checkpoint

WRITERS = (
    "versions.py", "local_storage.py", "pointer_file.py", "checkpoint.py", "ledger.py", "history.py", "events.py",
    "retention.py", "lease.py", "reader.py",
)  # fmt: skip
LOCKS = {".general.lock", ".general.trainer"}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.fault(
    "the trainer is killed before each kind of write: version, pointer, canary, checkpoint, ledger, history, events",
    "nothing is half there, a canary goes on or is withdrawn, no record and no second of the ledger is lost",
)
def test_killed_before_any_write_it_leaves_nothing_half_done_and_a_successor_goes_on(tmp_path, aftermath):
    killer, server = Killer("tests.faults.dying_trainer"), RedisServer(128)
    longest, killed, untold = 0.0, 0, 0
    with server, redis.Redis.from_url(server.url) as client:
        try:
            places: dict[str, None] = {}
            for attempt in range(5):
                client.flushall()
                home = tmp_path / f"whole {attempt}"
                prepare_with_old(server.url, home)
                places |= dict.fromkeys(killer.run(server.url, home, signal=9, before="")["writes"])
                if not missing_of(places):
                    break
            assert not missing_of(places)
            for number, place in enumerate(places):
                client.flushall()
                home = tmp_path / str(number)
                registry = prepare_with_old(server.url, home)
                killed += killer.run(server.url, home, signal=9, before=place)["signal"] == 9
                check_whole(server.url, home, registry)
                with Pointer(server.url, registry.root) as pointer, Ledger(server.url) as ledger:
                    on_trial, spent = pointer.get("general").canary, ledger.get("general").total
                begun = time.monotonic()
                assert killer.run(server.url, home, signal=9, before="")["signal"] == 0, place
                longest = max(longest, time.monotonic() - begun)
                check_whole(server.url, home, registry)
                untold += check_successor(server.url, home, registry, client, on_trial, spent)
            assert killed > 0.8 * len(places)  # a few come only where others take their time
        finally:
            killer.close()
    aftermath.lost = f"the event of a decision in {untold} of {killed} kills; nothing else"
    aftermath.errors, aftermath.seconds = "none: replicas go on with what they have", longest


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
    with Pointer(url, registry.root) as pointer, Ledger(url) as ledger, Events(url) as events:
        rollout, told = pointer.get("general"), {(one["kind"], one["version"]) for one in events.recent(steps=False)}
        # A run ends when it has promoted two: later canaries may still be on trial then.
        assert on_trial is None or rollout.canary != on_trial or rollout.stable > FIRST + 1
        assert ledger.get("general").total >= spent
    gone = [one.number for one in registry.removed("general")]
    numbers = sorted({*registry.numbers("general"), *gone})
    assert numbers == list(range(1, numbers[-1] + 1))
    for number in numbers[FIRST:]:
        assert ("canary", number) in told
    (group,) = client.xinfo_groups("osd:traces:domain:general")
    assert group["pending"] == 0
    found = checkpoint.load(with_canaries(home).home_dir / "trainer" / "general.safetensors")
    assert found is not None
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
