from __future__ import annotations

import time

from osd.config import Settings
from trainer.app import Trainer


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
