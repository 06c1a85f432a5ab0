"""Export of stable versions, with a command that runs after each export."""

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
from osd.target.identity import identify
from osd.target.model import load_model
from osd.vllm.exported import ExportedDrafter


class ExportSetup:
    """Registry with four versions, and a command that records its last argument."""

    def __init__(self, home: Path, target: Path) -> None:
        self.settings = Settings(home=home, target={"source": str(target)})
        self.registry, self.out, self.ran = Registry(self.settings.registry_dir), home / "out", home / "ran"
        drafter = Eagle.from_target(load_model(target, "float32", "cpu"), 100)
        for _ in range(4):
            self.registry.publish("general", drafter.weights(), drafter.config(), {})
        self.messages: list[str] = []

    def make_exports(self, script: str) -> StableExports:
        command = [
            sys.executable,
            "-c",
            f"import sys\nopen({str(self.ran)!r}, 'a').write(sys.argv[-1] + ' ')\n{script}",
        ]
        return StableExports(self.settings, "speculators", self.out, command, self.messages.append)

    def set_rollout(self, stable: int, canary: int | None = None) -> None:
        PointerFiles(self.registry.root).update(
            "general", lambda _: Rollout(stable, canary, 0.1 if canary else 0.0, 1.0)
        )

    def exported_versions(self) -> list[str]:
        """Return the versions that the command received."""
        return [Path(folder).name for folder in self.ran.read_text().split()] if self.ran.exists() else []


@pytest.fixture
def setup(tmp_path, tiny_target) -> ExportSetup:
    return ExportSetup(tmp_path / "home", tiny_target)


def test_stable_versions_are_exported_once_and_canaries_never(setup):
    exports = setup.make_exports("")
    exports.look()
    assert setup.exported_versions() == [], "no version is in service yet"
    setup.set_rollout(1)
    exports.look()
    exports.look()
    setup.set_rollout(1, canary=2)
    exports.look()
    assert setup.exported_versions() == ["1"]
    assert (setup.out / "1" / "config.json").exists()
    for stable in (2, 3, 1):
        setup.set_rollout(stable)
        exports.look()
    assert setup.exported_versions() == ["1", "2", "3", "1"]
    assert sorted(path.name for path in setup.out.iterdir()) == ["1", "3"], "the last two exports stay"


def test_failed_export_is_reported_and_repeated_a_minute_later(setup, monkeypatch):
    setup.set_rollout(2)
    exports = setup.make_exports("sys.exit(len(open(sys.argv[-1] + '/../../ran').read().split()) < 2)")
    exports.look()
    exports.look()
    assert setup.exported_versions() == ["2"]
    assert setup.messages == ["the command ended with exit code 1; trying again in 60 s"]
    monkeypatch.setattr(exporting.time, "monotonic", lambda: 1e9)
    exports.look()
    assert setup.exported_versions() == ["2", "2"]
    setup.set_rollout(9)
    exports.look()
    assert setup.messages[1:] == [
        "version 2 is exported, and the command has run",
        "there is no drafter version general/9; trying again in 60 s",
    ]


def test_export_names_its_target_as_traces_do(setup, tiny_target):
    exporting.export(setup.settings, 1, "speculators", setup.out / "1")
    assert ExportedDrafter.read(str(setup.out / "1")).target == identify(str(tiny_target), tiny_target).label
