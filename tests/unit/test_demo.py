from __future__ import annotations

from deploy.demo.report import chart


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
