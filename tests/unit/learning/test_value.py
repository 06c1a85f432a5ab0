"""What training is worth, on learners and traffic whose value can be worked out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from osd.demand import Demand, Workload
from osd.learning import value as module
from osd.learning.gate import GateDecision
from osd.learning.value import SECOND, SLICE, Horizon, LearningCurve, Point, Traffic, Value, alike, chain_length
from tests.unit.learning.toys import gate_figures


def workload(share, seconds, streams=1):
    """Of so many users who each ask again at once, whose rounds take these ``seconds`` by the tokens drafted."""
    always = Demand(((0, streams, 1.0), (streams, streams + 1, 0.0)), 10.0, 0.0)
    return Workload(share, always, (seconds,) * streams)


# A round takes a second, each drafted token a tenth of one more.
WORK = [workload(0.5, (1.0, 1.1, 1.2, 1.3))]


def decision(before, after, passed=True, weight=1.0, error=0.0):
    sides = [
        gate_figures((0.0,) * 3, weight=weight, kept_per_depth=(alike(length, 3),) * 3) for length in (after, before)
    ]
    return GateDecision(passed, False, "", sides[0], sides[1], kept_error=error)


def test_a_length_is_what_the_requests_themselves_are_given():
    """Greedy ones keep more of the same drafter than its distributions share with the target's."""
    it = Value(depth=2, stale=1000)
    before, after = (gate_figures((0.2, 0.2), kept_per_depth=kept) for kept in ((0.5, 0.4), (0.6, 0.5)))
    it.judged(GateDecision(True, False, "", after, before, error=0.0, kept_error=0.01))
    assert it.length == pytest.approx(1 + 0.6 + 0.6 * 0.5)
    assert it.curve.points[0].gained == pytest.approx(0.9 - 0.7)
    assert it.curve.points[0].error == pytest.approx(2 * 0.01)


def test_second_choices_save_where_they_are_drafted():
    cheap = [workload(0.5, (1.0, *(1.0 + 0.01 * n for n in range(1, 17))))]
    chains, trees = (Value(5, 1000, second).traffic(cheap) for second in (0.0, SECOND))
    assert trees.saving_rate(1.0, 1.3) > 1.1 * chains.saving_rate(1.0, 1.3) > 0


def taught(most, time, gates=4, each=60.0):
    """A value that has seen the gates of a drafter that gains ``most`` tokens per round, all but 1/e in ``time``."""
    it, length = Value(depth=3, stale=1000), 1.2
    for n in range(1, gates + 1):
        it.learned(each)
        now = 1.2 + most * (1 - math.exp(-n * each / time))
        it.judged(decision(length, now))
        length = now
    return it


def test_an_acceptance_and_the_length_of_its_chains_are_each_others_inverse():
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        assert alike(chain_length(acceptance, 4), 4) == pytest.approx(acceptance, abs=1e-9)
    assert chain_length(0.5, 2) == 1.75


def test_a_saving_rate_is_the_time_that_the_same_tokens_no_longer_need(monkeypatch):
    def alike_everywhere(acceptance, depth, certainty, second):
        return np.arange(depth + 1.0), np.cumsum(acceptance ** np.arange(depth + 1.0))

    monkeypatch.setattr(module, "nodes_and_lengths", alike_everywhere)
    # Two tokens per round, three drafted: 2 / 1.3 tokens a second; with 2.5 it is 2.5 / 1.3.
    found = Traffic(WORK, 3, 2.0).saving_rate(2.0, 2.5)
    assert found == pytest.approx(0.5 * (1 - 2.0 / 2.5), rel=1e-6)
    assert Traffic(WORK, 3, 2.0).saving_rate(2.5, 2.0) == pytest.approx(-found)
    assert Traffic(WORK * 2, 3, 2.0).saving_rate(2.0, 2.5) == pytest.approx(2 * found)


def test_a_weak_drafter_saves_something_where_some_of_its_tokens_are_sure(monkeypatch):
    # One token of four is accepted. If that is a chance that all have, its draft takes as long as what it saves.
    def found():
        return Traffic([workload(1.0, (1.0, 1.25, 1.45, 1.65))], 3, 1.0).saving_rate(1.0, chain_length(0.25, 3))

    drafted = found()
    assert 0.02 < drafted < 0.1
    monkeypatch.setattr(module, "_CERTAINTY", 1e6)
    assert found() == pytest.approx(0.0, abs=0.002)


def test_nothing_is_saved_where_rows_are_too_dear_or_both_drafters_too_weak_for_any_draft():
    assert Traffic([workload(0.9, (1.0, 3.0, 5.0, 7.0), 8)], 3, 2.0).saving_rate(1.5, 3.5) == 0
    it = Traffic([workload(1.0, (1.0, 1.4, 1.8, 2.2))], 3, 1.0)
    assert it.saving_rate(1.0, 1.3) == 0
    assert it.saving_rate(1.0, 2.5) > 0.1


def test_three_gates_determine_the_curve_of_a_learner():
    curve = LearningCurve()
    points = [Point(x, 0.8 * (1 - math.exp(-x / 100)), 0.0) for x in (30.0, 90.0, 200.0)]
    for point in points:
        curve.add(point)
    assert curve.most == pytest.approx(0.8, abs=0.05)
    assert curve.seconds == pytest.approx(100, rel=0.15)
    assert curve.gained(300) - curve.gained(200) == pytest.approx(0.8 * (math.exp(-2) - math.exp(-3)), abs=0.02)


def test_without_a_gate_the_curve_is_what_is_expected_beforehand_and_one_gate_moves_it():
    curve = LearningCurve(gain=0.5, seconds=150.0)
    assert 0.4 < curve.most < 0.7
    assert curve.gained(0) == 0
    before = curve.gained(120)
    curve.add(Point(60.0, 0.0, 0.01))
    assert curve.gained(120) < before / 3


def test_a_gate_that_is_not_sure_of_itself_moves_the_curve_less():
    sure, unsure = LearningCurve(), LearningCurve()
    sure.add(Point(100.0, 0.0, 0.01))
    unsure.add(Point(100.0, 0.0, 0.5))
    assert unsure.most > 2 * sure.most


def test_a_gain_is_never_expected_to_be_negative():
    curve = LearningCurve()
    for x in (30.0, 60.0, 90.0):
        curve.add(Point(x, -0.3, 0.05))
    assert 0 <= curve.gained(100) <= curve.gained(1000) < 0.05


def test_traffic_is_expected_to_stay_as_long_again_as_it_has_and_at_most_a_day():
    it = Horizon()
    assert it.seconds == 600
    it.passed(3600)
    assert it.seconds == pytest.approx(4200)
    it.alarm()
    assert it.seconds == pytest.approx(2100)
    for _ in range(100):
        it.passed(86_400)
    assert it.seconds == 86_400
    assert it.alarms < 1e-9


def test_training_pays_while_much_is_to_be_gained_and_no_longer_when_it_is_learnt():
    steep, flat = taught(most=1.0, time=200, gates=2), taught(most=1.0, time=200, gates=30)
    for it in (steep, flat):
        it.horizon.passed(7200)
    first, later = (it.invest(WORK, price=1.0, threads=2, pace=0.2) for it in (steep, flat))
    assert first.pays
    assert first.earns > first.costs > 0
    assert not later.pays
    assert later.earns < later.costs
    assert flat.invest(WORK, price=0.0, threads=2, pace=0.2).pays, "what costs nothing pays"


@pytest.mark.parametrize(
    ("change", "pays"),
    [
        ({}, True),
        ({"price": 30.0}, False),
        ({"workloads": [workload(0.001, (1.0, 1.1, 1.2, 1.3))]}, False),
        ({"workloads": []}, False),
        ({"pace": 0.005}, False),
        ({"uptake": 1.0}, True),
        ({"uptake": 1000.0}, False),
    ],
)
def test_a_slice_pays_by_price_traffic_and_the_time_that_it_takes(change, pays):
    it = taught(most=1.0, time=200, gates=2)
    it.horizon.passed(3600)
    asked = {"workloads": WORK, "price": 1.0, "threads": 2, "pace": 0.2} | change
    assert it.invest(**asked).pays is pays


def test_where_the_first_seconds_bring_nothing_a_longer_look_finds_what_pays():
    it = Value(depth=3, stale=1000)
    it.horizon.passed(20_000)
    it.curve = LearningCurve(gain=1.5, seconds=300)
    dear = [workload(1.0, (1.0, 1.3, 1.6, 1.9))]
    assert it.traffic(dear).saving_rate(1.0, 1.0 + it.curve.gained(SLICE)) == 0
    found = it.invest(dear, price=1.0, threads=2, pace=0.5)
    assert found.pays
    assert found.seconds > SLICE


def test_after_a_fall_of_acceptance_there_is_something_to_gain_again_and_less_time_for_it():
    it = taught(most=1.0, time=100, gates=20)
    it.horizon.passed(3600)
    before = it.invest(WORK, 1.0, 2, 0.2)
    it.drifted(0.7, 0.4)
    after = it.invest(WORK, 1.0, 2, 0.2)
    assert not before.pays
    assert after.pays
    assert after.gain > 5 * before.gain
    assert after.horizon == pytest.approx(before.horizon / 2)
    assert it.length == pytest.approx(2.2 - (chain_length(0.7, 3) - chain_length(0.4, 3)), abs=0.01)


def test_what_gates_said_long_ago_is_looked_at_again():
    it = taught(most=0.0, time=100, gates=6)
    flat = it.invest(WORK, 1.0, 2, 0.2).gain
    for _ in range(999):
        it.arrived()
    assert it.invest(WORK, 1.0, 2, 0.2).gain == flat
    it.arrived()
    assert it.invest(WORK, 1.0, 2, 0.2).gain > flat + 0.03


def test_beside_recall_a_drafter_is_worth_what_it_adds_to_it():
    alone, beside = Value(3, 1000), Value(3, 1000)
    alone.judged(decision(1.2, 1.6))
    beside.judged(decision(1.2, 1.6, weight=0.2))
    assert alone.length == pytest.approx(1.6)
    # Recall is right at .8 of the positions, so that little is left to be won.
    right, gained = 0.8 + 0.2 * alike(1.2, 3), 0.8 + 0.2 * alike(1.6, 3)
    assert beside.length == pytest.approx(chain_length(gained, 3))
    assert beside.curve.points[0].gained == pytest.approx(chain_length(gained, 3) - chain_length(right, 3))


def test_beside_recall_a_drafter_saves_nothing_where_its_calls_take_as_long_as_what_it_adds():
    figures = gate_figures((0.0,) * 3, weight=0.4, kept_per_depth=(0.2,) * 3)
    recall, now = chain_length(0.6, 3), chain_length(0.68, 3)
    it = Value(3, 1000)
    it.looked(figures)
    assert it.length == pytest.approx(now)
    assert figures.length_of_recall == pytest.approx(recall)
    saved = []
    for call in (0.0, 0.1, 2.0):
        work = [replace(one, calls=(call,) * len(one.rounds)) for one in (workload(0.5, (1.0, 1.0, 1.0, 1.0)),)]
        # Before, it adds 12 of 100 tokens to what recall gives, after it 24: of the rounds four in ten call it.
        saved.append(it.traffic(work).saving_rate(now, chain_length(0.76, 3)))
    free, cheap, dear = saved
    assert free > cheap > 0.5 * free
    assert dear == 0
    for before, after in ((1.0, recall), (1.2, 1.4)):
        assert it.traffic(work).saving_rate(before, after) == 0, "recall gives as much"


def test_what_recall_gives_is_known_after_a_checkpoint_and_falls_with_acceptance():
    it = Value(3, 1000)
    it.judged(decision(1.2, 1.6, weight=0.2))
    recall = it.traffic(WORK).recalled
    assert recall == pytest.approx(chain_length(0.8, 3))
    other = Value(3, 1000)
    other.resume(json.loads(json.dumps(it.state())))
    assert other.traffic(WORK).recalled == recall
    it.drifted(0.8, 0.3)
    assert it.traffic(WORK).recalled == it.length < recall


def test_a_candidate_that_is_not_put_in_service_is_a_point_of_the_curve_and_nothing_else():
    it = Value(3, 1000)
    it.learned(30)
    it.judged(decision(1.5, 1.4, passed=False))
    assert it.length == pytest.approx(1.5)
    it.learned(30)
    it.judged(decision(1.5, 1.7))
    assert [round(point.gained, 6) for point in it.curve.points] == [-0.1, 0.2]
    it.judged(GateDecision(False, True, "not enough held-out records"))
    assert len(it.curve.points) == 2


def test_gates_are_charged_to_the_slices_between_them():
    cheap, dear = Value(3, 1000), Value(3, 1000)
    for it, seconds in ((cheap, 3.0), (dear, 60.0)):
        it.learned(60)
        it.charged(seconds)
    costs = [it.invest(WORK, 1.0, 2, 1.0) for it in (cheap, dear)]
    assert costs[1].costs / costs[1].seconds > 1.4 * costs[0].costs / costs[0].seconds


def test_it_goes_on_from_its_state_and_leaves_everything_as_it_is_when_that_cannot_be_read():
    it = taught(most=0.7, time=150)
    it.horizon.passed(1000)
    it.charged(5)
    it.arrived()
    state = json.loads(json.dumps(it.state()))
    other = Value(3, 1000)
    other.resume(state)
    assert other.state() == it.state()
    assert other.invest(WORK, 1.0, 2, 0.2) == it.invest(WORK, 1.0, 2, 0.2)
    for broken in ({**state, "horizon": [1]}, {**state, "unseen": "x"}, {**state, "points": [[1, 2]]}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            other.resume(broken)
        assert other.state() == it.state()


def test_a_drafter_that_was_not_judged_yet_gives_nothing_and_a_checkpoint_knows_that():
    it = Value(depth=3, stale=1000)
    assert it.length is None
    assert it.traffic(WORK).length == 1.0
    other = taught(most=1.0, time=200, gates=2)
    other.resume(it.state())
    assert other.length is None


def test_a_slice_that_was_begun_ends_although_the_traffic_has_become_a_little_less_dear():
    it = Value(depth=3, stale=1000)
    it.horizon.passed(3600)
    prices = np.geomspace(0.01, 1000, 200)

    def most() -> float:
        """The highest price at which the next slice pays."""
        return max(price for price in prices if it.invest(WORK, price, threads=2, pace=0.2).pays)

    before = most()
    it.learned(20.0)
    assert most() > 1.5 * before
    it.compared(1.2, 1.0, error=0.02, passed=True)
    after = it.state()
    assert most() < 1.5 * before, "a gate was paid for, and the next slice is a whole one"
    it.learned(20.0)
    begun = most()
    other = Value(depth=3, stale=1000)
    other.resume(after)
    it = other
    it.learned(20.0)
    assert most() == begun
