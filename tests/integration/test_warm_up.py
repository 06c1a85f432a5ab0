"""Warm-up by the command, and a service that starts from its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.preparation import ensure_version
from osd.capture.server import RedisServer
from osd.config import load_settings
from osd.drafting.recall.snapshot import Snapshots
from osd.registry.versions import Registry
from tests.command import osd, small_options
from tests.redis_servers import free_port
from tests.waiting import HANG_SECONDS


@pytest.mark.soak
def test_service_starts_from_the_warm_up_of_its_home(tiny_target: Path, tmp_path: Path):
    options = small_options(tiny_target, free_port())
    changed = ["drafter.kind=mixed", "drafter.trained.kind=eagle", "drafter.trained.vocabulary=128"]
    changed += ["trainer.steps_per_candidate=5", "trainer.min_records=4", "trainer.learning_rate=0.01"]
    options += [argument for pair in changed for argument in ("--set", pair)]
    home = tmp_path / "home"
    with osd(home, "drafters", "warm-up", "--minutes", "3", "--prompts", "pydoc", *options) as process:
        output, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, errors
    assert "kept the drafter's version" in output
    assert "and recall's table" in output
    assert not (home / "registry").exists(), "a warm-up does not change the registry of its home"

    settings = load_settings(None, [f"home={home}", *options[1::2]], {})
    with RedisServer(64) as server:
        assert ensure_version(settings, server.url, tiny_target) == 1
    version = Registry(settings.registry_dir).load("general", 1)
    assert version.manifest["warm_up"]["requests"] > 4
    assert Snapshots(settings.registry_dir).about("general") is not None
