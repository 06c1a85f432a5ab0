from __future__ import annotations

import time

from osd.config import Settings
from trainer.actor import Trainer
from trainer.distributed import DistributedTrainer


def test_an_error_that_nobody_foresaw_is_told_in_the_status_and_tried_again(tmp_path):
    settings = Settings(home=tmp_path, target={"source": str(tmp_path / "nowhere")})  # type: ignore[arg-type]
    trainer = Trainer(settings, "redis://127.0.0.1:1")
    deadline = time.monotonic() + 30
    while not trainer.status()["failure"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "TargetError: target.source: there is no directory" in trainer.status()["failure"]
    assert trainer.status()["state"] == "waiting"
    assert trainer.pause()
    trainer.resume()
    began = time.monotonic()
    assert trainer.stop()
    assert time.monotonic() - began < 1


class Idle:
    """Rank 0 of a group that does nothing."""

    def status(self):
        return {}

    def stop(self): ...


def test_the_end_of_a_group_is_what_a_rank_told_and_else_a_death(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.distributed.Remote", lambda actor: actor)
    monkeypatch.setattr(DistributedTrainer, "_train", lambda group: group._stop.wait())
    group = DistributedTrainer(Settings(home=tmp_path), "redis://127.0.0.1:1")
    try:
        group.join(Idle())
        assert group.status()["failure"] == ""
        group.fail("rank 1: RuntimeError: Connection closed by peer")
        group.join(Idle())
        assert group.status()["failure"] == "rank 1: RuntimeError: Connection closed by peer"
        group.join(Idle())
        assert group.status()["failure"] == "a process of the group died"
    finally:
        assert group.stop()
