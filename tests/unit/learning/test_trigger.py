from __future__ import annotations

from osd.config import TrainerSettings
from osd.learning.gate import GateDecision
from osd.learning.online import PASSES, TrainingTrigger
from tests.unit.learning.toys import gate_figures


def verdict(candidate, baseline, passed=True):
    first, second = (gate_figures((0.5,), divergence=value) for value in (candidate, baseline))
    return GateDecision(passed, False, "", first, second)


def trigger(resumed=False, **settings):
    it = TrainingTrigger(TrainerSettings(**settings))
    if resumed:
        it.resumed()
    return it


def worn(it):
    """All records were trained on, with all passes that they come with."""
    it.worked(10**9)
    return it


def test_the_first_candidate_is_waited_for_however_thin_traffic_is():
    it = trigger()
    it.arrived(10)
    assert worn(it).due(0, 0.0)


def test_the_same_records_are_trained_on_while_candidates_improve_and_no_longer():
    it = worn(trigger())
    it.judged(verdict(1.0, 2.0), held_out=5)
    assert it.due(0, 0.0)
    it.judged(verdict(0.9, 1.0), held_out=5)
    assert it.due(0, 1.0)
    it.judged(verdict(0.899, 0.9), held_out=5)
    assert not it.due(0, 2.0)
    assert not it.due(0, 1e6)


def test_a_candidate_must_improve_on_the_last_one_too_even_when_that_was_rejected():
    it = worn(trigger())
    it.judged(verdict(0.8, 1.0, passed=False), held_out=5)
    assert it.due(0, 0.0)
    it.judged(verdict(0.85, 1.0, passed=False), held_out=5)
    assert not it.due(0, 1.0)


def test_figures_of_other_held_out_records_are_not_compared():
    it = worn(trigger())
    it.judged(verdict(0.2, 1.0), held_out=5)
    it.judged(verdict(0.85, 1.0), held_out=6)
    assert it.due(0, 0.0)


def test_without_a_judgement_or_with_one_that_is_not_finite_training_waits():
    it = worn(trigger())
    it.judged(GateDecision(False, True, "not enough held-out records"), held_out=0)
    assert not it.due(0, 0.0)
    it = worn(trigger())
    it.judged(verdict(float("nan"), 1.0), held_out=0)
    assert not it.due(0, 0.0)


def test_new_records_get_their_passes_whatever_the_last_candidate_was():
    it = worn(trigger())
    it.judged(verdict(1.0, 1.0), held_out=5)
    assert not it.due(0, 0.0)
    it.arrived(10)
    assert it.due(1, 1.0)
    it.worked(10 * PASSES - 1)
    assert it.due(0, 2.0)
    it.worked(1)
    assert not it.due(0, 3.0)


def test_an_update_starts_at_so_many_records():
    it = trigger(resumed=True, trigger_records=4, trigger_seconds=1000)
    it.arrived(100)
    assert [it.due(fresh, float(fresh)) for fresh in (1, 2, 3, 4)] == [False, False, False, True]
    assert it.due(0, 5.0)
    assert not worn(it).due(0, 6.0)
    assert not it.due(3, 7.0)


def test_an_update_starts_when_a_record_has_waited_too_long():
    it = trigger(resumed=True, trigger_records=100, trigger_seconds=30)
    assert not it.due(0, 0.0)
    assert not it.due(1, 500.0)
    assert not it.due(2, 529.0)
    assert it.due(2, 530.0)


def test_drift_that_is_found_during_an_update_starts_another_one():
    it = trigger(trigger_records=100, trigger_seconds=1e6)
    it.drifted()
    assert it.due(0, 0.0), "the first candidate is still to come"
    it.resumed()
    assert it.due(1, 1.0)


def test_an_update_starts_at_drift_with_the_first_record_that_can_teach_it():
    it = trigger(resumed=True, trigger_records=100, trigger_seconds=1e6)
    it.drifted()
    assert not it.due(0, 0.0)
    assert it.due(1, 1.0)
    assert not worn(it).due(0, 2.0)
    assert not it.due(1, 3.0)
