"""Each version that becomes stable is exported, and a command restarts who drafts with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from osd.admin import exporting
from osd.admin.exporting import StableExports
from osd.config import Settings
from osd.drafting.eagle.drafter import Eagle
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry
from osd.target.model import load_model


class World:
    def __init__(self, home: Path, target: Path) -> None:
        self.settings = Settings(home=home, target={"source": str(target)})
        self.registry, self.out, self.ran = Registry(self.settings.registry_dir), home / "out", home / "ran"
        drafter = Eagle.from_target(load_model(target, "float32", "cpu"), 100)
        for _ in range(4):
            self.registry.publish("general", drafter.weights(), drafter.config(), {})
        self.said: list[str] = []

    def follow(self, script: str) -> StableExports:
        command = [
            sys.executable,
            "-c",
            f"import sys\nopen({str(self.ran)!r}, 'a').write(sys.argv[-1] + ' ')\n{script}",
        ]
        return StableExports(self.settings, "speculators", self.out, command, self.said.append)

    def put(self, stable: int, canary: int | None = None) -> None:
        PointerFiles(self.registry.root).update(
            "general", lambda _: Rollout(stable, canary, 0.1 if canary else 0.0, 1.0)
        )

    def told(self) -> list[str]:
        """The versions that the command was given."""
        return [Path(folder).name for folder in self.ran.read_text().split()] if self.ran.exists() else []


@pytest.fixture
def world(tmp_path, tiny_target) -> World:
    return World(tmp_path / "home", tiny_target)


def test_the_command_has_the_directory_of_each_stable_version_once_and_of_no_canary(world):
    following = world.follow("")
    following.look()
    assert world.told() == [], "nothing is in service yet"
    world.put(1)
    following.look()
    following.look()
    world.put(1, canary=2)
    following.look()
    assert world.told() == ["1"]
    assert (world.out / "1" / "config.json").exists()
    for stable in (2, 3, 1):
        world.put(stable)
        following.look()
    assert world.told() == ["1", "2", "3", "1"]
    assert sorted(path.name for path in world.out.iterdir()) == ["1", "3"], "of the last two the exports stay"


def test_what_goes_wrong_is_said_and_tried_again_a_minute_later(world, monkeypatch):
    world.put(2)
    following = world.follow("sys.exit(len(open(sys.argv[-1] + '/../../ran').read().split()) < 2)")
    following.look()
    following.look()
    assert world.told() == ["2"]
    assert world.said == ["the command ended with exit code 1; trying again in 60 s"]
    monkeypatch.setattr(exporting.time, "monotonic", lambda: 1e9)
    following.look()
    assert world.told() == ["2", "2"]
    world.put(9)
    following.look()
    assert world.said[1:] == [
        "version 2 is exported, and the command has run",
        "general/9: no such drafter version; trying again in 60 s",
    ]
