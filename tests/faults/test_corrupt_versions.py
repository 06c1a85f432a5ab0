"""The pointer names a damaged or unsuitable version: the replicas of a service refuse it and continue."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from osd.registry.versions import Registry
from tests.e2e.conftest import REPLICAS, Service, running, shake

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "a version in service has a flipped bit, is truncated, has a NaN, or is for another target",
        "it is refused by name; replicas keep the old version, retry a version that may be repaired, and "
        "load the next version",
        process="replica: damaged files of a version",
    ),
]

WEIGHTS = "model.safetensors"
RETRY_SECONDS = 4.0
"""Time in which a replica tries a damaged version two more times."""


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service")) as service:
        yield service


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
    weights = load_file(version / WEIGHTS)
    weight = next(weight for weight in weights.values() if weight.is_floating_point())
    weight.view(-1)[0] = float("nan")
    save_file(weights, version / WEIGHTS)
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256((version / WEIGHTS).read_bytes()).hexdigest()
    (version / "manifest.json").write_text(json.dumps(manifest))


def for_another_target(version: Path, other: Path) -> None:
    """Replace the version by a complete one for a target of another width."""
    first = Registry(version.parents[1]).load("general", 1)
    narrow = {
        name: weight[..., : weight.shape[-1] // 2] if weight.is_floating_point() else weight
        for name, weight in first.weights.items()
    }
    Registry(other).publish("general", narrow, first.config, {})
    for entry in (other / "general" / "1").iterdir():
        (version / entry.name).write_bytes(entry.read_bytes())


@pytest.mark.parametrize(("damage", "reason", "is_repairable"), [
    (flip, "does not match the sha256", True),
    (cut, "does not match the sha256", True),
    (not_a_number, "not finite", True),
    (for_another_target, "shape", False),
])  # fmt: skip
def test_replicas_refuse_a_damaged_version(service, tmp_path, eventually, fault_result, damage, reason, is_repairable):
    good, damaged, following = (service.publish(shake) for _ in range(3))
    folder = service.registry.root / "general"
    service.point_at(good)
    eventually(lambda: service.versions() == [good] * REPLICAS)
    text = answer(service)
    damage(folder / str(damaged), tmp_path)
    service.point_at(damaged)

    def reasons() -> list[str]:
        events = [event for event in service.data()["events"] if event["kind"] == "rejected"]
        return [event["reason"] for event in events if event["version"] == damaged]

    eventually(lambda: answer(service) == text and len(reasons()) == REPLICAS)
    time.sleep(RETRY_SECONDS)
    assert len(reasons()) == REPLICAS, "one event of each replica"
    assert all(reason in stated for stated in reasons()), reasons()
    assert service.versions() == [good] * REPLICAS
    began = time.monotonic()
    if is_repairable:
        for name in (WEIGHTS, "manifest.json"):
            (folder / str(damaged) / name).write_bytes((folder / str(good) / name).read_bytes())
        eventually(lambda: answer(service) == text and service.versions() == [damaged] * REPLICAS)
    fault_result.seconds = time.monotonic() - began
    service.point_at(following)
    eventually(lambda: answer(service) == text and service.versions() == [following] * REPLICAS)
    fault_result.lost, fault_result.errors = "nothing", "none"


def answer(service: Service) -> str:
    """Return the text of a greedy completion."""
    return service.complete("some text").raise_for_status().json()["choices"][0]["text"]
