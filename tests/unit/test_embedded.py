from __future__ import annotations

import signal

import ray

from deploy.embedded import start_ray
from osd.config import Settings


def test_ray_takes_no_signal_away_from_the_command(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise AssertionError("not sent")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        # As Ray's own does: its handler ends the process wherever it is.
        monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        start_ray(Settings(home=tmp_path))
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
