from __future__ import annotations

from typing import Any

import pytest

from deploy.demo import run as demo
from deploy.demo.report import chart
from osd.config import Settings


def column(text: str, place: int, height: int) -> str:
    return "".join(line.ljust(80)[5 + place] for line in text.splitlines()[:height])


def test_a_column_is_as_high_as_its_value():
    text = chart([(0.5, 0.5), (1.5, 1.0), (2.5, 0.0)], [], 4, 4, 4)
    assert [column(text, place, 4) for place in range(4)] == ["  ██", "████", "    ", "    "]


def test_gaps_between_points_repeat_the_value_before():
    text = chart([(0, 0.25), (3.9, 0.5)], [], 4, 4, 4)
    assert [column(text, place, 4) for place in range(4)] == ["   █", "   █", "   █", "  ██"]


def test_marks_stand_under_their_time():
    assert chart([], [0, 7.5, 99], 10, 10, 2).splitlines()[2][5:] == "^      ^ ^"


def test_what_earlier_runs_learnt_serves_no_request_of_this_one(monkeypatch: pytest.MonkeyPatch):
    seen: list[Settings] = []

    def note(settings: Settings, *others: Any) -> None:
        seen.append(settings)

    monkeypatch.setattr(demo, "_run", note)
    demo.run(Settings(), demo.Plan("unittest", 1.0, 1.0), None)
    (settings,) = seen
    assert settings.domain.startswith("unittest-")
    assert settings.engine.domains == 1
