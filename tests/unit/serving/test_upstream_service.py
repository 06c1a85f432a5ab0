"""Counters of servers behind taps."""

from __future__ import annotations

import pytest

from osd.registry.replica_loads import UpstreamReport
from serving.dashboard import upstream_service as module
from serving.dashboard.upstream_service import UpstreamCounts


def test_upstream_report_has_the_time_of_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard shows each second once, so a late report must count in the current second."""
    counts = UpstreamCounts("eagle")
    reports = []
    for now, rounds in ((1000.5, 10), (1001.5, 30)):
        monkeypatch.setattr(module.time, "time", lambda now=now: now)
        reports.append(counts.report("tap", UpstreamReport(now - 0.9, "general", 1, rounds=rounds)))
        assert reports[-1].time == now
    assert reports[-1].counters["rounds"] == 20


def test_only_a_change_of_a_known_version_is_a_swap() -> None:
    counts = UpstreamCounts("eagle")
    swaps = [counts.report("vllm", UpstreamReport(1.0, "general", version)).counters for version in (0, 1, 1, 2)]
    assert [counters.get("swaps", 0) for counters in swaps] == [0, 0, 0, 1]
