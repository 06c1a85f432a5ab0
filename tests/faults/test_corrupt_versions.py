"""The pointer names a version that is damaged or does not fit: a real replica refuses it and serves on."""

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
    data = bytearray((version / WEIGHTS).read_bytes())
    data[len(data) // 2] ^= 1
    (version / WEIGHTS).write_bytes(data)


def cut(version: Path, other: Path) -> None:
    with (version / WEIGHTS).open("r+b") as file:
        file.truncate(1000)


def not_a_number(version: Path, other: Path) -> None:
    """With a manifest that agrees with it."""
    data = bytearray((version / WEIGHTS).read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    (version / WEIGHTS).write_bytes(data)
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256(data).hexdigest()
    (version / "manifest.json").write_text(json.dumps(manifest))


def for_another_target(version: Path, other: Path) -> None:
    """Whole, and of a target of another width."""
    found = Registry(version.parents[1]).load("general", 1)
    narrow = {name: weight[..., : weight.shape[-1] // 2] for name, weight in found.weights.items()}
    Registry(other).publish("general", narrow, found.config, {})
    for entry in (other / "general" / "1").iterdir():
        (version / entry.name).write_bytes(entry.read_bytes())


@pytest.mark.parametrize(
    ("damage", "reason", "may_be_put_right"),
    [
        (flip, "does not match the sha256", True),
        (cut, "does not match the sha256", True),
        (not_a_number, "not finite", True),
        (for_another_target, "shape", False),
    ],
)
def test_it_is_refused_by_name_and_the_next_good_one_is_taken(
    replica_settings: Settings, redis_url: str, tiny_target, tmp_path, monkeypatch, eventually: Callable[..., None],
    aftermath, damage: Callable[[Path, Path], None], reason: str, may_be_put_right: bool,
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
        told = len(events.recent())
        damage(second, tmp_path)
        put(pointer, "general", Rollout(2, None, 0.0, 2.0))
        finish = decode(replica, "meanwhile", tokens=40)

        def refused() -> list[str]:
            news = events.recent()[told:]
            return [one["reason"] for one in news if (one["kind"], one["version"]) == ("rejected", 2)]

        eventually(refused)
        finish()
        assert replica.engine.drafter_version == 1
        tried = len(tries)
        eventually(lambda: len(tries) >= tried + 3 * may_be_put_right)
        assert len(refused()) == 1, "it is told once"
        assert reason in refused()[0]
        begun = time.monotonic()
        if may_be_put_right:
            for name in (WEIGHTS, "manifest.json"):
                (second / name).write_bytes((good / name).read_bytes())
            eventually(lambda: replica.engine.drafter_version == 2)
        put(pointer, "general", Rollout(3, None, 0.0, 3.0))
        eventually(lambda: replica.engine.drafter_version == 3)
        aftermath.seconds = time.monotonic() - begun
        decode(replica, "afterwards")()
    aftermath.lost, aftermath.errors = "nothing", "none"
