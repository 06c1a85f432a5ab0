from __future__ import annotations

from typing import Any

import pytest

from deploy.demo import run as demo
from deploy.demo.report import chart
from osd.config import Settings


def column(text: str, place: int, height: int) -> str:
    return "".join(line.ljust(80)[5 + place] for line in text.splitlines()[:height])


def test_chart_column_has_the_height_of_its_value():
    text = chart([(0.5, 0.5), (1.5, 1.0), (2.5, 0.0)], [], 4, 4, 4)
    assert [column(text, place, 4) for place in range(4)] == ["  ██", "████", "    ", "    "]


def test_chart_gap_repeats_the_previous_value():
    text = chart([(0, 0.25), (3.9, 0.5)], [], 4, 4, 4)
    assert [column(text, place, 4) for place in range(4)] == ["   █", "   █", "   █", "  ██"]


def test_chart_marks_are_below_their_times():
    assert chart([], [0, 7.5, 99], 10, 10, 2).splitlines()[2][5:] == "^      ^ ^"


def test_demo_uses_a_new_domain_in_each_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[Settings] = []

    def note(settings: Settings, *arguments: Any) -> None:
        seen.append(settings)

    monkeypatch.setattr(demo, "_run", note)
    demo.run(Settings(), demo.DemoPlan("unittest", 1.0, 1.0), None)
    (settings,) = seen
    assert settings.domain.startswith("unittest-")
    assert settings.engine.domains == 1
