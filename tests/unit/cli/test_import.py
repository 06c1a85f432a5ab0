"""Import of a drafter that was trained elsewhere."""

from __future__ import annotations

import torch

from osd.config import LanguageModelSettings
from osd.drafting import formats, initial
from osd.registry.pointer_file import PointerFiles, Rollout
from osd.registry.versions import Registry
from tests.command import run_cli
from tests.pointers import LockedHides, write


def test_import_removes_old_versions_under_the_lock(tiny_target, tmp_path, monkeypatch):
    drafter = initial(LanguageModelSettings(layers=1), tiny_target, tmp_path)
    origin = formats.ExportOrigin("general", 1, "target", tiny_target, 3)
    formats.write(drafter, "transformers", origin, tmp_path / "out")
    registry = Registry(LockedHides(tmp_path / "registry"))
    for _ in range(3):
        registry.publish("general", {"w": torch.zeros(3)}, {}, {"parent": None})
    write(PointerFiles(registry.storage), "general", Rollout(3, None, 0.0, 1.0))
    monkeypatch.setattr("osd.registry.object_storage.storage_of", lambda settings: registry.storage)
    options = (f"target.source={tiny_target}", "registry.keep=1")
    settings = [word for option in options for word in ("--set", option)]
    result = run_cli("drafters", "import", tmp_path / "out", *settings, home=tmp_path)
    assert result.exit_code == 0, result.output
    assert registry.numbers("general") == [3, 4]
