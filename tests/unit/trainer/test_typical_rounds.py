"""What rounds cost on average of some minutes, of replicas that say something else every second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osd.demand import WINDOW_SECONDS, Demand, Workload
from trainer.investor import TypicalRounds

WORK = Workload(0.5, Demand(((0, 1, 1.0),), 10.0, 0.001), ((0.010, 0.012), (0.011, 0.014)), uptake=0.3, reading=0.001)


def scaled(work: Workload, by: float) -> Workload:
    return replace(work, rounds=tuple(tuple(by * one for one in each) for each in work.rounds))


def first(found: list[Workload]) -> float:
    return found[0].rounds[0][1]


def test_what_moves_from_second_to_second_is_told_as_its_average():
    it = TypicalRounds()
    assert it.of({"r": WORK}, 0.0) == [WORK]
    found = [it.of({"r": scaled(WORK, 1.5 if second % 2 else 0.5)}, float(second)) for second in range(1, 400)][-1]
    assert [list(each) for each in found[0].rounds] == [pytest.approx(each, rel=0.01) for each in WORK.rounds]
    assert replace(found[0], rounds=WORK.rounds) == WORK, "all else is as it is now"


def test_what_changed_for_good_is_believed_within_minutes():
    it = TypicalRounds()
    for second in range(1000):
        it.of({"r": WORK}, float(second))
    found = [first(it.of({"r": scaled(WORK, 2.0)}, 1000.0 + second)) for second in range(int(2 * WINDOW_SECONDS))]
    assert found == sorted(found)
    assert (found[0], found[-1]) == pytest.approx((0.012, 0.024), rel=0.15)


def test_calls_beside_recall_are_averaged_too():
    it = TypicalRounds()
    it.of({"r": replace(WORK, calls=(0.002, 0.004))}, 0.0)
    (found,) = it.of({"r": replace(WORK, calls=(0.004, 0.004))}, 1.0)
    assert found.calls == pytest.approx((0.003, 0.004), rel=0.01)


def test_replicas_are_told_apart_forgotten_when_they_leave_and_begun_anew_with_other_rounds():
    it = TypicalRounds()
    it.of({"a": WORK, "b": scaled(WORK, 3.0)}, 0.0)
    assert [one.rounds[0][0] for one in it.of({"a": WORK, "b": scaled(WORK, 3.0)}, 1.0)] == pytest.approx([0.01, 0.03])
    it.of({"a": WORK}, 2.0)
    assert it.of({"b": WORK}, 3.0) == [WORK]
    deeper = replace(WORK, rounds=((0.010, 0.012, 0.020), (0.011, 0.014, 0.021)))
    assert it.of({"b": deeper}, 4.0) == [deeper]
