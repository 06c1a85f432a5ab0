"""The learner by itself: traces in, micro-steps and candidates out."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch

from osd.config import TrainerSettings
from osd.drafting.base import DrafterError
from osd.learning.distiller import Distiller, DistillerError
from osd.learning.drift import Drift
from osd.learning.gate import Gate, GateDecision
from osd.learning.online import PASSES, Learner, Local, TrainingTrigger, empty_replay
from osd.learning.replay import is_held_out
from tests.unit.learning.toys import VOCABULARY, Toy, gate_figures, make_trace

TOKENS, COMPLETION = 64, 30
NAMES = [f"r{n}" for n in range(60)]


class Counting(Toy):
    """Remembers the traffic that its vocabulary was adapted to."""

    def __init__(self):
        super().__init__()
        self.adapted = []

    def adapt_vocabulary(self, counts):
        self.adapted.append(counts)


class Several(Local):
    """Two that compute, one after the other."""

    size = 2

    def step(self, distiller, samples):
        self.samples = samples
        return [super(Several, self).step(distiller, [sample]) for sample in samples][-1]


def learner(drafter=None, replay=None, recalled=None, **changes):
    torch.manual_seed(0)
    usual = {"learning_rate": 0.03, "update_tokens": 1, "min_records": 4, "held_out": 0.3, "steps_per_candidate": 60}
    settings = TrainerSettings(**usual | changes)
    gate = Gate(depth=2, divergence="forward_kl", min_positions=60)
    distiller = Distiller(Toy() if drafter is None else drafter, settings)
    return Learner(distiller, settings, gate, VOCABULARY, replay or empty_replay(settings, enough=0), recalled)


def fed(names=NAMES, drafter=None, **changes):
    it = learner(drafter, **changes)
    for n, name in enumerate(names):
        it.add(make_trace(name, completion=COMPLETION, seed=n))
    return it


def weights(it):
    return torch.cat([weight.flatten() for weight in it.distiller.drafter.weights().values()])


def test_each_record_counts_once_and_only_what_is_trained_on_is_worth_passes():
    it = fed()
    held = sum(is_held_out(name, 0.3) for name in NAMES)
    assert 0 < held < len(NAMES)
    assert it.trigger.figures()["budget"] == PASSES * COMPLETION * (len(NAMES) - held)
    before = (it.counters.records, it.counters.held_out, it.trigger.figures())
    assert before[:2] == (len(NAMES), held)
    for n, name in enumerate(NAMES):
        assert it.add(make_trace(name, completion=COMPLETION, seed=n)).part == "duplicate"
    assert (it.counters.records, it.counters.held_out, it.trigger.figures()) == before


def test_it_begins_with_enough_records_of_which_one_can_be_trained_on():
    held = [name for name in NAMES if is_held_out(name, 0.3)]
    kept = next(name for name in NAMES if name not in held)
    it = fed(held[:5])
    assert not it.ready
    it.add(make_trace(kept))
    assert it.ready
    assert not fed([kept, *held[:2]]).ready


def test_a_micro_step_takes_each_record_for_the_first_time_once_and_counts_what_it_read():
    it = fed()
    trained = {name for name in NAMES if not is_held_out(name, 0.3)}
    seen, positions, budget = [], 0, it.trigger.figures()["budget"]
    while it.replay.fresh_records:
        learned = it.step(TOKENS, Local())
        assert not learned.step.skipped
        assert 0 < learned.positions <= TOKENS
        seen += [name for name, _ in learned.fresh]
        positions += learned.positions
    assert sorted(seen) == sorted(trained)
    assert (it.counters.trained, it.counters.tokens) == (len(trained), positions)
    assert it.trigger.figures()["budget"] == max(budget - positions, 0)


def test_each_of_those_who_compute_has_a_micro_batch_of_its_own():
    it, several = fed(), Several()
    learned = it.step(TOKENS, several)
    first, second = several.samples
    assert learned.positions == first.positions + second.positions == it.counters.tokens
    assert learned.fresh == first.fresh + second.fresh
    assert not set(first.fresh) & set(second.fresh)
    assert it.distiller.steps == 2


def test_the_vocabulary_follows_the_traffic_before_the_first_step_and_in_each_candidate():
    drafter = Counting()
    it = fed(drafter=drafter)
    it.step(TOKENS, Local())
    it.step(TOKENS, Local())
    assert len(drafter.adapted) == 1
    assert np.allclose(drafter.adapted[0].numpy(), it.replay.token_counts(VOCABULARY))
    it.candidate()
    assert len(drafter.adapted) == 2


def test_what_it_learns_passes_the_gate_against_what_it_began_with_and_not_the_other_way_round():
    it, begun = fed(), learner().distiller.drafter
    while not it.due:
        it.step(TOKENS, Local())
    assert it.distiller.steps == 60
    decision = it.propose(begun)
    assert decision.passed, decision.reason
    assert decision.candidate.divergence < decision.baseline.divergence / 1.5
    assert it.next_candidate == 120
    better = Toy()
    better.load_weights(it.distiller.drafter.weights())
    it.distiller.load_weights(begun.weights())
    worse = it.propose(better)
    assert (worse.passed, worse.waits) == (False, False)


def test_the_first_candidate_is_due_after_thirty_cpu_seconds_and_one_after_each_fall():
    it = fed(steps_per_candidate=10_000)
    for _ in range(5):
        assert not it.due
        it.step(TOKENS, Local())
        it.worked(6.5)
    assert it.due
    it.propose(Toy())
    it.step(TOKENS, Local())
    it.worked(100.0)
    assert not it.due
    it.drifted(Drift("general", 1, before=0.7, now=0.4))
    it.worked(29.0)
    assert not it.due
    it.worked(1.0)
    assert it.due


def test_after_a_fall_records_from_before_it_judge_no_more():
    it = learner()
    for n, name in enumerate(NAMES):
        it.add(msgspec.structs.replace(make_trace(name, completion=COMPLETION, seed=n), created=float(n)))
    before = it.replay.known("held_out")
    trained = it.replay.known("train")
    half = len(NAMES) // 2
    it.drifted(Drift("general", 1, before=0.7, now=0.4, since=float(half)))
    after = it.replay.known("held_out")
    assert set(after) == {key for key in before if NAMES.index(key[0]) >= half}
    assert 0 < len(after) < len(before)
    assert it.replay.known("train") == trained
    assert sum(len(batch.lengths) for batch in it.held_out()) == len(after)
    it.drifted(Drift("general", 1, before=0.7, now=0.4))
    assert it.replay.known("held_out") == after, "where no record began a fall all of them stay"


def test_a_candidate_has_all_that_was_gathered():
    it = fed(update_tokens=10**6)
    before = weights(it)
    it.step(TOKENS, Local())
    assert torch.equal(weights(it), before)
    it.candidate()
    assert not torch.equal(weights(it), before)


def test_where_too_little_is_held_out_the_next_candidate_comes_after_a_fifth_of_the_steps():
    it = fed([name for name in NAMES if not is_held_out(name, 0.3)])
    it.step(TOKENS, Local())
    decision = it.propose(Toy())
    assert decision.waits
    assert it.next_candidate == 1 + 60 // 5


def test_the_gate_sees_the_same_held_out_positions_each_time_and_nothing_that_is_trained_on():
    it = fed()
    first, again = ([batch.token_ids for batch in it.held_out()] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    held = sum(is_held_out(name, 0.3) for name in NAMES)
    assert sum(len(ids) for ids in first) == held


def test_it_goes_on_from_its_state_as_if_it_had_not_stopped():
    straight, stopped = fed(), fed()
    for it in (straight, stopped):
        while it.replay.fresh_records:
            it.step(TOKENS, Local())
    tensors, state = stopped.state()
    after = learner(replay=stopped.replay)
    after.replay.sample(TOKENS)  # whatever was drawn meanwhile
    after.resume(tensors, json.loads(json.dumps(state)))
    assert (after.counters, after.next_candidate) == (straight.counters, straight.next_candidate)
    losses = [[it.step(TOKENS, Local()).step.loss for _ in range(10)] for it in (straight, after)]
    assert losses[0] == losses[1]
    assert torch.equal(weights(straight), weights(after))


def test_a_smaller_interval_than_last_time_counts_at_once():
    it = fed()
    it.step(TOKENS, Local())
    after = learner(steps_per_candidate=5)
    after.resume(*it.state())
    assert after.next_candidate == 6


def test_a_state_that_is_not_its_own_is_refused():
    it = fed()
    it.step(TOKENS, Local())
    tensors, state = it.state()
    with pytest.raises(DistillerError, match="cannot be read"):
        learner().resume(tensors, {name: value for name, value in state.items() if name != "next_gate"})
    with pytest.raises((DistillerError, DrafterError)):
        learner(Toy(draft_ids=torch.arange(3))).resume(tensors, state)


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
