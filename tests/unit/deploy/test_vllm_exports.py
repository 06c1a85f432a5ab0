"""Exports for replicas with vLLM: one per stable version, and earlier ones for a version that cannot be exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.vllm.exports import prepare_export
from osd.config import ConfigError, Settings
from osd.drafting.eagle.drafter import Eagle
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry
from osd.target.model import load_model
from serving.vllm.exports import exported_versions
from tests.tiny import make_tiny


class World:
    """Home with five versions."""

    def __init__(self, folder: Path) -> None:
        target = make_tiny(folder / "tiny", layers=6)
        self.settings = Settings.model_validate(
            {"home": folder, "target": {"source": str(target), "dtype": "float32"}, "drafter": {"kind": "eagle"}}
        )
        self.registry = Registry(self.settings.registry_dir)
        drafter = Eagle.from_target(load_model(target, "float32", "cpu"), 64)
        for _ in range(5):
            self.registry.publish("general", drafter.weights(), drafter.config(), {})

    def export(self, stable: int) -> list[int]:
        """Bring a version into service, prepare its export, and return the exported versions."""
        PointerFiles(self.registry.root).update("general", lambda _: Rollout(stable, None, 0.0, 1.0))
        prepare_export(self.settings)
        return exported_versions(self.settings)

    def damage(self, version: int) -> None:
        (self.registry.root / "general" / str(version) / "model.safetensors").write_bytes(b"damaged")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


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
