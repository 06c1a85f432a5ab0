"""Calibration of forward costs on a busy machine."""

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
    """Target whose forward takes 10 + rows times ``unit`` seconds, multiplied for ``disturbed`` forwards.

    ``disturbed`` are factors by number of the forward.
    """

    context = 64

    def __init__(self, disturbed: Mapping[int, float], unit: float = 0.001) -> None:
        self.now, self.rows, self._disturbed, self._unit = 0.0, [], disturbed, unit
        self.bucketed: object | None = None
        self.trees: set[int] = set()
        self.begins: set[tuple[int, int]] = set()  # number of rows, and place of the first

    def perf_counter(self) -> float:
        return self.now

    def forward(self, rows: Any, wanted: torch.Tensor) -> Any:
        count = len(rows.token_ids)
        self.now += (10 + count) * self._unit * self._disturbed.get(len(self.rows), 1.0)
        self.rows.append(count)
        self.trees |= {count} if rows.mask is not None else set()
        self.begins.add((count, int(rows.positions[0])))
        return SimpleNamespace(logits=torch.zeros(len(wanted), 1))


def measured(machine: Any, pauses: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, float]]:
    """Return the reports of a calibration in milliseconds, on a machine that gets work after ``pauses`` pauses."""
    monkeypatch.setattr(calibration, "time", machine)
    reports: list[dict[int, float]] = []
    left = iter(range(pauses))

    def is_idle(seconds: float) -> bool:
        return not seconds or next(left, None) is not None

    calibrate(machine, 16, lambda seconds: reports.append({c: s * 1e3 for c, s in seconds.items()}), is_idle)
    return reports


def right(rows: int) -> Any:
    return pytest.approx(10 + rows)


def test_calibration_ignores_a_disturbed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of one size that are disturbed each time are ignored, too."""
    second, third = (1 + sweep * len(ROWS) for sweep in (1, 2))
    machine = Machine({5: 4.0, second + 9: 3.0} | dict.fromkeys((3, second + 2, third + 2), 2.0))
    (reports,) = measured(machine, 0, monkeypatch)
    assert reports == {rows: right(4 if rows == 3 else rows) for rows in ROWS}


def test_calibration_on_a_gpu_compiles_tree_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({})
    machine.bucketed = object()
    measured(machine, 0, monkeypatch)
    assert machine.trees == {rows for rows in ROWS if rows > 2}, "a tree of two rows is a chain"
    assert machine.rows[2 * len(ROWS) :] == [*ROWS] * 3, "trees are not measured"


def test_calibration_is_corrected_after_a_busy_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large forwards are disturbed in the first sweeps; later sweeps correct them."""
    busy = Machine({1 + sweep * len(ROWS) + size: 5.0 for sweep in range(6) for size in range(7, len(ROWS))})
    first, *later = measured(busy, 6, monkeypatch)
    assert first[16] > 3 * (10 + 16)
    assert len(later) == 6
    assert later[-1] == {rows: right(rows) for rows in ROWS}


def test_calibration_stops_within_one_short_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated measurements use short forwards and check for work after each of them."""
    machine: Any = Machine({}, unit=0.0125)
    monkeypatch.setattr(calibration, "time", machine)
    at_once = 0

    def is_idle(seconds: float) -> bool:
        nonlocal at_once
        at_once = at_once or len(machine.rows)
        return len(machine.rows) < at_once + 12  # in the middle of the second sweep

    reports: list[Mapping[int, float]] = []
    calibrate(machine, 16, reports.append, is_idle)
    again = machine.rows[at_once:]
    assert len(again) == 12
    assert max(again) == 8, "forwards of 10 or more rows take at least 250 ms"
    assert len(reports) == 2


@pytest.mark.parametrize("context", [1024, 64])
def test_calibration_rows_follow_text_that_fits_the_context(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({})
    machine.context = context
    measured(machine, 1, monkeypatch)
    assert machine.begins == {(count, min(256, context - count)) for count in ROWS}
