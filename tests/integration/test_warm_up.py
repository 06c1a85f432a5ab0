"""A warm-up by the command, and the service that begins with what it left."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.preparation import ensure_version
from osd.capture.server import RedisServer
from osd.config import load_settings
from osd.drafting.recall.snapshot import Snapshots
from osd.registry.versions import Registry
from tests.command import osd, small
from tests.redis_servers import free_port
from tests.waiting import HANG_SECONDS


@pytest.mark.soak
def test_a_service_begins_with_what_a_warm_up_of_its_home_learnt(tiny_target: Path, tmp_path: Path):
    given = small(tiny_target, free_port())
    changed = ["drafter.kind=mixed", "drafter.trained.kind=eagle", "drafter.trained.vocabulary=128"]
    changed += ["trainer.steps_per_candidate=5", "trainer.min_records=4", "trainer.learning_rate=0.01"]
    given += [argument for pair in changed for argument in ("--set", pair)]
    home = tmp_path / "home"
    with osd(home, "drafters", "warm-up", "--minutes", "3", "--prompts", "pydoc", *given) as process:
        said, complaints = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, complaints
    assert "kept the drafter's version" in said
    assert "and recall's table" in said
    assert not (home / "registry").exists(), "a warm-up is no service of this home"

    settings = load_settings(None, [f"home={home}", *given[1::2]], {})
    with RedisServer(64) as server:
        assert ensure_version(settings, server.url, tiny_target) == 1
    version = Registry(settings.registry_dir).load("general", 1)
    assert version.manifest["warm_up"]["requests"] > 4
    assert Snapshots(settings.registry_dir).about("general") is not None
