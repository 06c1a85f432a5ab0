"""What forwards take is measured while others are at work, and known all the same."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from osd.engine import calibration
from osd.engine.calibration import calibrate

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


class Machine:
    """A target of which a forward takes ten ``units`` of seconds and one for each row, longer while it is disturbed.

    The ``disturbed`` forwards by their number, the first one 0, take so many times as long.
    """

    context = 64

    def __init__(self, disturbed: Mapping[int, float], unit: float = 0.001) -> None:
        self.now, self.rows, self._disturbed, self._unit = 0.0, [], disturbed, unit
        self.bucketed: object | None = None
        self.trees: set[int] = set()
        self.begins: set[tuple[int, int]] = set()  # rows, and the place of the first

    def perf_counter(self) -> float:
        return self.now

    def forward(self, rows: Any, wanted: torch.Tensor) -> Any:
        count = len(rows.token_ids)
        self.now += (10 + count) * self._unit * self._disturbed.get(len(self.rows), 1.0)
        self.rows.append(count)
        self.trees |= {count} if rows.mask is not None else set()
        self.begins.add((count, int(rows.positions[0])))
        return SimpleNamespace(logits=torch.zeros(len(wanted), 1))


def told(machine: Any, pauses: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, float]]:
    """What is told of a machine on which something is wanted after so many pauses, in milliseconds."""
    monkeypatch.setattr(calibration, "time", machine)
    found: list[dict[int, float]] = []
    left = iter(range(pauses))

    def rests(seconds: float) -> bool:
        return not seconds or next(left, None) is not None

    calibrate(machine, 16, lambda seconds: found.append({c: s * 1e3 for c, s in seconds.items()}), rests)
    return found


def right(rows: int) -> Any:
    return pytest.approx(10 + rows)


def test_one_forward_that_was_disturbed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those of one size that were disturbed each time."""
    second, third = (1 + sweep * len(ROWS) for sweep in (1, 2))
    machine = Machine({5: 4.0, second + 9: 3.0} | dict.fromkeys((3, second + 2, third + 2), 2.0))
    (found,) = told(machine, 0, monkeypatch)
    assert found == {rows: right(4 if rows == 3 else rows) for rows in ROWS}


def test_what_a_gpu_needs_for_trees_is_made_before_any_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({})
    machine.bucketed = object()
    told(machine, 0, monkeypatch)
    assert machine.trees == {rows for rows in ROWS if rows > 2}, "and a tree of two rows is a chain"
    assert machine.rows[2 * len(ROWS) :] == [*ROWS] * 3, "nor are any measured"


def test_who_starts_on_the_same_cores_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large forwards are disturbed in all that is measured at first: what comes later corrects it."""
    busy = Machine({1 + sweep * len(ROWS) + size: 5.0 for sweep in range(6) for size in range(7, len(ROWS))})
    first, *later = told(busy, 6, monkeypatch)
    assert first[16] > 3 * (10 + 16)
    assert len(later) == 6
    assert later[-1] == {rows: right(rows) for rows in ROWS}


def test_nobody_waits_for_more_than_one_short_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured again is short, and asks after each forward whether something is wanted."""
    machine: Any = Machine({}, unit=0.0125)
    monkeypatch.setattr(calibration, "time", machine)
    at_once = 0

    def rests(seconds: float) -> bool:
        nonlocal at_once
        at_once = at_once or len(machine.rows)
        return len(machine.rows) < at_once + 12  # which is in the midst of the second sweep

    found: list[Mapping[int, float]] = []
    calibrate(machine, 16, found.append, rests)
    again = machine.rows[at_once:]
    assert len(again) == 12
    assert max(again) == 8, "of 10 and more rows each takes 250 ms and more"
    assert len(found) == 2


@pytest.mark.parametrize("context", [1024, 64])
def test_rows_stand_behind_some_text_as_far_as_there_is_room(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({})
    machine.context = context
    told(machine, 1, monkeypatch)
    assert machine.begins == {(count, min(256, context - count)) for count in ROWS}
