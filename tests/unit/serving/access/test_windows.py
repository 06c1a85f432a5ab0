"""What is left of a limit, by the two windows that it slides over."""

from __future__ import annotations

import pytest

from serving.access.windows import Window


def after(seconds, counted, size=60):
    """What is counted some seconds later, when nothing more has happened."""
    before, before_left, now, now_left = counted
    end = now_left - size
    if seconds < end:
        return before, max(0.0, before_left - seconds), now, now_left - seconds
    return now, max(0.0, now_left - seconds), 0, 0.0


@pytest.mark.parametrize(
    ("counted", "used"),
    [
        ((0, 0.0, 0, 0.0), 0.0),
        ((0, 0.0, 30, 120.0), 30.0),
        ((40, 30.0, 5, 90.0), 25.0),
        ((400, 30.0, 5, 90.0), 205.0),
        ((0, 0.0, 300, 100.0), 300.0),
        ((100, 60.0, 100, 120.0), 200.0),
    ],
)
def test_there_is_room_again_when_it_says_and_not_before(counted, used):
    window = Window.of(100, 60, counted)
    assert window.used == pytest.approx(used)
    assert window.remaining == max(0, 100 - used)
    if used < 100:
        assert window.wait == 0
    else:
        assert Window.of(100, 60, after(window.wait - 0.01, counted)).used >= 100
        assert Window.of(100, 60, after(window.wait + 0.01, counted)).used < 100
    assert Window.of(100, 60, after(window.reset, counted)).used == 0
