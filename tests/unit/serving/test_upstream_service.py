"""Servers behind taps, counted like replicas."""

from __future__ import annotations

import pytest

from osd.registry.replica_loads import UpstreamReport
from serving.dashboard import upstream_service as module
from serving.dashboard.upstream_service import Counted


def test_what_a_tap_told_counts_in_the_second_in_which_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard shows a second once: what came for it later would never be seen."""
    counted = Counted("eagle")
    heard = []
    for now, rounds in ((1000.5, 10), (1001.5, 30)):
        monkeypatch.setattr(module.time, "time", lambda now=now: now)
        heard.append(counted.report("tap", UpstreamReport(now - 0.9, "general", 1, rounds=rounds)))
        assert heard[-1].time == now
    assert heard[-1].counters["rounds"] == 20
