"""The pointer names a damaged or unsuitable version: a real replica refuses it and continues."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from osd import drafting
from osd.config import Settings
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry
from serving.replica import rollout_follower
from tests.pointers import put
from tests.replicas import Replicas, decode

pytestmark = [
    pytest.mark.fault(
        "a version in service has a flipped bit, is truncated, has a NaN, or is for another target",
        "it is refused by name; replicas keep the old version, retry a version that may be repaired, and "
        "load the next version",
    ),
]

WEIGHTS = "model.safetensors"


def flip(version: Path, other: Path) -> None:
    """Flip one bit of the weights."""
    data = bytearray((version / WEIGHTS).read_bytes())
    data[len(data) // 2] ^= 1
    (version / WEIGHTS).write_bytes(data)


def cut(version: Path, other: Path) -> None:
    """Truncate the weights."""
    with (version / WEIGHTS).open("r+b") as file:
        file.truncate(1000)


def not_a_number(version: Path, other: Path) -> None:
    """Write a NaN, with a matching manifest."""
    data = bytearray((version / WEIGHTS).read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    (version / WEIGHTS).write_bytes(data)
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256(data).hexdigest()
    (version / "manifest.json").write_text(json.dumps(manifest))


def for_another_target(version: Path, other: Path) -> None:
    """Replace the version by a complete one for a target of another width."""
    first = Registry(version.parents[1]).load("general", 1)
    narrow = {name: weight[..., : weight.shape[-1] // 2] for name, weight in first.weights.items()}
    Registry(other).publish("general", narrow, first.config, {})
    for entry in (other / "general" / "1").iterdir():
        (version / entry.name).write_bytes(entry.read_bytes())


@pytest.mark.parametrize(
    ("damage", "reason", "is_repairable"),
    [
        (flip, "does not match the sha256", True),
        (cut, "does not match the sha256", True),
        (not_a_number, "not finite", True),
        (for_another_target, "shape", False),
    ],
)
def test_replica_refuses_a_damaged_version(
    replica_settings: Settings, redis_url: str, tiny_target, tmp_path, monkeypatch, eventually: Callable[..., None],
    fault_result, damage: Callable[[Path, Path], None], reason: str, is_repairable: bool,
):  # fmt: skip
    monkeypatch.setattr(rollout_follower, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(rollout_follower, "_FIRST_PAUSE", 0.05)
    tries, load = [], Registry.load
    monkeypatch.setattr(Registry, "load", lambda registry, *version: tries.append(version) or load(registry, *version))
    registry = Registry(replica_settings.registry_dir)
    first = drafting.initial(replica_settings.drafter, tiny_target, replica_settings.home_dir)
    for _ in range(3):
        registry.publish("general", first.weights(), first.config(), {})
    good, second = registry.root / "general" / "1", registry.root / "general" / "2"
    with (
        Pointer(redis_url, registry.root) as pointer, Events(redis_url) as events,
        Replicas(replica_settings, redis_url) as replicas,
    ):  # fmt: skip
        put(pointer, "general", Rollout(1, None, 0.0, 1.0))
        replica = replicas.start("a")
        old_events = len(events.recent())
        damage(second, tmp_path)
        put(pointer, "general", Rollout(2, None, 0.0, 2.0))
        finish = decode(replica, "during", tokens=40)

        def refused() -> list[str]:
            new_events = events.recent()[old_events:]
            return [event["reason"] for event in new_events if (event["kind"], event["version"]) == ("rejected", 2)]

        eventually(refused)
        finish()
        assert replica.engine.drafter_version == 1
        count = len(tries)
        eventually(lambda: len(tries) >= count + 3 * is_repairable)
        assert len(refused()) == 1, "one event"
        assert reason in refused()[0]
        began = time.monotonic()
        if is_repairable:
            for name in (WEIGHTS, "manifest.json"):
                (second / name).write_bytes((good / name).read_bytes())
            eventually(lambda: replica.engine.drafter_version == 2)
        put(pointer, "general", Rollout(3, None, 0.0, 3.0))
        eventually(lambda: replica.engine.drafter_version == 3)
        fault_result.seconds = time.monotonic() - began
        decode(replica, "after")()
    fault_result.lost, fault_result.errors = "nothing", "none"
