"""Trainers that are killed at any line of publishing and saving."""

from __future__ import annotations

import re

import pytest

from osd.capture.writer import TraceWriter
from osd.registry.events import Events
from osd.registry.lease import Lease
from osd.registry.pointer import Pointer, Rollout
from osd.registry.pointer_file import PointerFiles
from osd.registry.versions import Registry
from tests.integration.killed import settings
from tests.killer import Killer
from tests.pointers import put
from tests.unit.learning.toys import Toy, make_trace
from trainer import checkpoint

RECORDS = 40


def prepare(url, home):
    """Create a domain with a first version and records; return its registry."""
    registry, toy = Registry(settings(home).registry_dir), Toy()
    registry.publish("general", toy.weights(), toy.config(), {})
    with Pointer(url, settings(home).registry_dir) as pointer:
        put(pointer, "general", Rollout(1, None, 0.0, 1.0))
    writer = TraceWriter(url, settings(home).capture.model_copy(update={"max_queue": RECORDS}))
    for n in range(RECORDS):
        assert writer.offer(make_trace(f"request-{n}", completion=30, seed=n))
    writer.close()
    assert writer.counters() == {"written": RECORDS, "dropped": 0}
    return registry


def check_whole(url, home, registry):
    """Assert that all visible versions and the checkpoint are complete after the kill."""
    numbers = [info.number for info in registry.list("general")]
    for number in numbers:
        registry.load("general", number)
    with Pointer(url, settings(home).registry_dir) as pointer:
        assert pointer.get("general").stable in numbers
    path = settings(home).home_dir / "trainer" / "general.safetensors"
    if path.exists():
        assert checkpoint.load(path) is not None


@pytest.mark.fault(
    "the trainer is killed at any moment of a write",
    "no version and no acknowledged record is lost, and no partial result remains",
    process="trainer: SIGKILL at a line of code",
)
@pytest.mark.parametrize("points", [2, pytest.param(16, marks=pytest.mark.soak)])
def test_trainer_killed_while_writing_loses_nothing(redis_url, redis_client, tmp_path, points):
    killer = Killer("tests.integration.killed")
    try:
        registry = prepare(redis_url, tmp_path / "whole")
        whole = killer.run(redis_url, tmp_path / "whole", kill_at=0)
        assert whole["signal"] == 0
        assert whole["lines"] > 100
        assert len(registry.list("general")) > 1
        check_finished(redis_url, redis_client, tmp_path / "whole", registry)
        lines = whole["lines"]
        killed = 0
        for point in range(points):
            redis_client.flushall()
            home = tmp_path / str(point)
            registry = prepare(redis_url, home)
            killed += killer.run(redis_url, home, kill_at=1 + point * lines // points)["signal"] == 9
            check_whole(redis_url, home, registry)
            assert killer.run(redis_url, home, kill_at=0)["signal"] == 0
            check_whole(redis_url, home, registry)
            check_finished(redis_url, redis_client, home, registry)
        assert killed >= points * 3 // 4  # a later run may execute fewer lines than the first
    finally:
        killer.close()


def check_finished(url, client, home, registry):
    """Assert that every version was put in service once, and that every record is kept and acknowledged."""
    numbers = [info.number for info in registry.list("general")]
    events = Events(url)
    published = [event["version"] for event in events.recent() if event["kind"] == "published"]
    events.close()
    assert sorted(published) == numbers[1:]
    with Pointer(url, settings(home).registry_dir) as pointer:
        assert pointer.get("general").stable == numbers[-1]
    (group,) = client.xinfo_groups("osd:traces:domain:general")
    assert group["pending"] == 0
    saved = checkpoint.load(settings(home).home_dir / "trainer" / "general.safetensors")
    assert saved is not None
    # A record that is delivered again after a crash may count twice.
    counters = saved[1]["counters"]
    assert counters["records"] >= RECORDS
    assert counters["trained"] + counters["held_out"] >= RECORDS
    assert registry.unfinished("general") is None
    hidden = [entry.name for entry in (registry.root / "general").iterdir() if entry.name.startswith(".")]
    # Directories and attempt files that were not renamed; a later publication deletes them.
    assert all(re.fullmatch(r"\.(\.attempt\.json\.)?[0-9a-f]{16}", name) for name in hidden), hidden


@pytest.mark.parametrize("moved", [False, True])
def test_interrupted_promotion_is_finished_unless_overridden(redis_url, tmp_path, moved):
    from trainer.rollout import DomainVersions, Promotion

    registry, toy = Registry(tmp_path), Toy()
    first = registry.publish("general", toy.weights(), toy.config(), {})
    with Pointer(redis_url, tmp_path) as pointer:
        put(pointer, "general", Rollout(first, None, 0.0, 1.0))
        attempt = registry.begin("general", {"parent": first, "share": 0.0})
        manifest = {"parent": first, "trained_on": {"steps": 1}, "gate": {"acceptance": 0.5}, "attempt": attempt}
        second = registry.publish("general", toy.weights(), toy.config(), manifest)
        if moved:
            put(pointer, "general", Rollout(first, None, 0.0, 2.0, pinned=True))
        events = Events(redis_url)
        trainer = settings(tmp_path).trainer
        service = DomainVersions("general", registry, pointer, events, Lease(PointerFiles(tmp_path), "general"))
        publisher = Promotion(service, trainer, lambda config: Toy(), 20)
        version = publisher.load_stable()
        assert version is not None
        assert version.number == pointer.get("general").stable == (first if moved else second)
        assert [event["kind"] for event in events.recent()] == ([] if moved else ["published"])
        assert registry.unfinished("general") is None
        events.close()
