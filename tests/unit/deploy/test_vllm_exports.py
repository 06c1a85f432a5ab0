"""Exports for replicas with vLLM: one per stable version, and earlier ones for a version that cannot be exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from deploy.vllm.exports import ShapeFollower, prepare_export
from osd.config import ConfigError, Settings
from osd.drafting.eagle.drafter import Eagle
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry
from osd.target.model import load_model
from serving.vllm.exports import exported_versions
from tests.tiny import make_tiny


class World:
    """Home and its registry."""

    def __init__(self, home: Path, target: Path) -> None:
        self.settings = Settings.model_validate(
            {"home": home, "target": {"source": str(target), "dtype": "float32"}, "drafter": {"kind": "eagle"}}
        )
        self.registry = Registry(self.settings.registry_dir)
        self.model = load_model(target, "float32", "cpu")

    def publish(self, vocabulary: int) -> None:
        drafter = Eagle.from_target(self.model, vocabulary)
        self.registry.publish("general", drafter.weights(), drafter.config(), {})

    def export(self, stable: int) -> list[int]:
        """Bring a version into service, prepare its export, and return the exported versions."""
        self.move(stable)
        prepare_export(self.settings)
        return exported_versions(self.settings)

    def move(self, stable: int) -> None:
        PointerFiles(self.registry.root).update("general", lambda _: Rollout(stable, None, 0.0, 1.0))

    def damage(self, version: int) -> None:
        (self.registry.root / "general" / str(version) / "model.safetensors").write_bytes(b"damaged")


class Restarts:
    """Restarts that a test ends."""

    def __init__(self) -> None:
        self.begun: list[tuple[Callable[[], None], Future[None]]] = []

    def begin(self, before: Callable[[], None]) -> Future[None]:
        self.begun.append((before, Future()))
        return self.begun[-1][1]

    def end(self) -> None:
        before, running = self.begun[-1]
        before()
        running.set_result(None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), layers=6)


@pytest.fixture(scope="module")
def home(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home with five versions."""
    world = World(tmp_path_factory.mktemp("home"), target)
    for _ in range(5):
        world.publish(64)
    return world.settings.home_dir


@pytest.fixture
def world(home: Path, target: Path, tmp_path: Path) -> World:
    return World(shutil.copytree(home, tmp_path / "home"), target)


def test_stable_version_is_exported_once_and_three_stay(world: World) -> None:
    assert world.export(1) == [1]
    folder = world.settings.home_dir / "vllm" / "general"
    written = (folder / "1" / "osd.json").stat().st_mtime_ns
    assert json.loads((folder / "1" / "osd.json").read_text())["version"] == 1
    assert world.export(1) == [1]
    assert (folder / "1" / "osd.json").stat().st_mtime_ns == written
    for stable, exported in ((2, [1, 2]), (3, [1, 2, 3]), (4, [2, 3, 4]), (2, [2, 3, 4]), (5, [3, 4, 5])):
        assert world.export(stable) == exported


def test_damaged_version_leaves_the_earlier_export(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.export(1)
    world.damage(2)
    assert world.export(2) == [1]
    assert "version 2 cannot be exported for vLLM; replicas start with another" in caplog.text


def test_damaged_version_without_an_earlier_export_is_refused(world: World) -> None:
    world.damage(1)
    with pytest.raises(ConfigError, match="version 1 cannot be exported for vLLM: "):
        world.export(1)


def test_only_a_version_of_another_shape_restarts_replicas(world: World) -> None:
    world.export(1)
    restarts = Restarts()
    follower = ShapeFollower(world.settings, restarts.begin)
    world.move(2)
    follower.look()
    assert not restarts.begun, "the replicas load it themselves"
    world.publish(48)
    world.move(6)
    for _ in range(3):
        follower.look()
    assert len(restarts.begun) == 1, "one at a time"
    restarts.end()
    assert exported_versions(world.settings) == [1, 6]
    follower.look()
    assert len(restarts.begun) == 1, "the replicas have the new shape"
    world.move(2)
    follower.look()
    assert len(restarts.begun) == 2


def test_failed_restart_is_repeated_for_the_next_version(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.export(1)
    world.publish(48)
    world.publish(48)
    restarts = Restarts()
    follower = ShapeFollower(world.settings, restarts.begin)
    world.move(6)
    follower.look()
    restarts.begun[-1][1].set_exception(RuntimeError("no room"))
    follower.look()
    assert "the replicas were not restarted for version 6: no room" in caplog.text
    world.move(7)
    follower.look()
    assert len(restarts.begun) == 2
