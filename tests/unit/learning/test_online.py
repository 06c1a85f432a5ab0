"""Online learner and its trigger, without a trainer."""

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
from osd.learning.online import PASSES, Learner, LocalExecutor, TrainingTrigger, empty_replay
from osd.learning.replay import is_held_out
from tests.unit.learning.toys import VOCABULARY, Toy, gate_figures, make_trace

TOKENS, COMPLETION = 64, 30
NAMES = [f"r{n}" for n in range(60)]


class Counting(Toy):
    """Drafter that records the counts that its vocabulary was adapted to."""

    def __init__(self):
        super().__init__()
        self.adapted = []

    def adapt_vocabulary(self, counts):
        self.adapted.append(counts)


class TwoExecutors(LocalExecutor):
    """Executor of two micro-batches, one after the other."""

    size = 2

    def step(self, distiller, samples):
        self.samples = samples
        return [super(TwoExecutors, self).step(distiller, [sample]) for sample in samples][-1]


def learner(drafter=None, replay=None, recall=None, **changes):
    torch.manual_seed(0)
    usual = {"learning_rate": 0.03, "update_tokens": 1, "min_records": 4, "held_out": 0.3, "steps_per_candidate": 60}
    settings = TrainerSettings(**usual | changes)
    gate = Gate(depth=2, divergence="forward_kl", min_positions=60)
    distiller = Distiller(Toy() if drafter is None else drafter, settings)
    return Learner(distiller, settings, gate, VOCABULARY, replay or empty_replay(settings, min_held_out=0), recall)


def fed(names=NAMES, drafter=None, **changes):
    it = learner(drafter, **changes)
    for n, name in enumerate(names):
        it.add(make_trace(name, completion=COMPLETION, seed=n))
    return it


def weights(it):
    return torch.cat([weight.flatten() for weight in it.distiller.drafter.weights().values()])


def test_add_counts_records_once_and_budgets_training():
    it = fed()
    held = sum(is_held_out(name, 0.3) for name in NAMES)
    assert 0 < held < len(NAMES)
    assert it.trigger.figures()["budget"] == PASSES * COMPLETION * (len(NAMES) - held)
    before = (it.counters.records, it.counters.held_out, it.trigger.figures())
    assert before[:2] == (len(NAMES), held)
    for n, name in enumerate(NAMES):
        assert it.add(make_trace(name, completion=COMPLETION, seed=n)).part == "duplicate"
    assert (it.counters.records, it.counters.held_out, it.trigger.figures()) == before


def test_learner_is_ready_with_enough_training_records():
    held = [name for name in NAMES if is_held_out(name, 0.3)]
    kept = next(name for name in NAMES if name not in held)
    it = fed(held[:5])
    assert not it.ready
    it.add(make_trace(kept))
    assert it.ready
    assert not fed([kept, *held[:2]]).ready


def test_step_trains_each_fresh_record_once():
    it = fed()
    trained = {name for name in NAMES if not is_held_out(name, 0.3)}
    seen, positions, budget = [], 0, it.trigger.figures()["budget"]
    while it.replay.fresh_records:
        learned = it.step(TOKENS, LocalExecutor())
        assert not learned.step.skipped
        assert 0 < learned.positions <= TOKENS
        seen += [name for name, _ in learned.fresh]
        positions += learned.positions
    assert sorted(seen) == sorted(trained)
    assert (it.counters.trained, it.counters.tokens) == (len(trained), positions)
    assert it.trigger.figures()["budget"] == max(budget - positions, 0)


def test_executor_of_two_gets_a_micro_batch_each():
    it, executor = fed(), TwoExecutors()
    learned = it.step(TOKENS, executor)
    first, second = executor.samples
    assert learned.positions == first.positions + second.positions == it.counters.tokens
    assert learned.fresh == first.fresh + second.fresh
    assert not set(first.fresh) & set(second.fresh)
    assert it.distiller.steps == 2


def test_vocabulary_adapts_at_first_step_and_candidates():
    drafter = Counting()
    it = fed(drafter=drafter)
    it.step(TOKENS, LocalExecutor())
    it.step(TOKENS, LocalExecutor())
    assert len(drafter.adapted) == 1
    assert np.allclose(drafter.adapted[0].numpy(), it.replay.token_counts(VOCABULARY))
    it.candidate()
    assert len(drafter.adapted) == 2


def test_trained_candidate_passes_the_gate():
    it, initial = fed(), learner().distiller.drafter
    while not it.due:
        it.step(TOKENS, LocalExecutor())
    assert it.distiller.steps == 60
    decision = it.propose(initial)
    assert decision.passed, decision.reason
    assert decision.candidate.divergence < decision.baseline.divergence / 1.5
    assert it.next_candidate == 120
    better = Toy()
    better.load_weights(it.distiller.drafter.weights())
    it.distiller.load_weights(initial.weights())
    worse = it.propose(better)
    assert (worse.passed, worse.waits) == (False, False)


def test_candidate_is_due_after_cpu_seconds_and_drift():
    it = fed(steps_per_candidate=10_000)
    for _ in range(5):
        assert not it.due
        it.step(TOKENS, LocalExecutor())
        it.add_seconds(6.5)
    assert it.due
    it.propose(Toy())
    it.step(TOKENS, LocalExecutor())
    it.add_seconds(100.0)
    assert not it.due
    it.on_drift(Drift("general", 1, before=0.7, now=0.4))
    it.add_seconds(29.0)
    assert not it.due
    it.add_seconds(1.0)
    assert it.due


def test_drift_drops_older_held_out_records():
    it = learner()
    for n, name in enumerate(NAMES):
        it.add(msgspec.structs.replace(make_trace(name, completion=COMPLETION, seed=n), created=float(n)))
    before = it.replay.record_keys("held_out")
    trained = it.replay.record_keys("train")
    half = len(NAMES) // 2
    it.on_drift(Drift("general", 1, before=0.7, now=0.4, since=float(half)))
    after = it.replay.record_keys("held_out")
    assert set(after) == {key for key in before if NAMES.index(key[0]) >= half}
    assert 0 < len(after) < len(before)
    assert it.replay.record_keys("train") == trained
    assert sum(len(batch.lengths) for batch in it.held_out()) == len(after)
    it.on_drift(Drift("general", 1, before=0.7, now=0.4))
    assert it.replay.record_keys("held_out") == after, "without a start of the fall all of them stay"


def test_candidate_includes_gathered_gradients():
    it = fed(update_tokens=10**6)
    before = weights(it)
    it.step(TOKENS, LocalExecutor())
    assert torch.equal(weights(it), before)
    it.candidate()
    assert not torch.equal(weights(it), before)


def test_waiting_gate_brings_the_next_candidate_forward():
    it = fed([name for name in NAMES if not is_held_out(name, 0.3)])
    it.step(TOKENS, LocalExecutor())
    decision = it.propose(Toy())
    assert decision.waits
    assert it.next_candidate == 1 + 60 // 5


def test_held_out_batches_are_repeatable():
    it = fed()
    first, again = ([batch.token_ids for batch in it.held_out()] for _ in range(2))
    assert all(torch.equal(ids, repeated) for ids, repeated in zip(first, again, strict=True))
    held = sum(is_held_out(name, 0.3) for name in NAMES)
    assert sum(len(ids) for ids in first) == held


def test_resumed_learner_continues_exactly():
    straight, stopped = fed(), fed()
    for it in (straight, stopped):
        while it.replay.fresh_records:
            it.step(TOKENS, LocalExecutor())
    tensors, state = stopped.state()
    after = learner(replay=stopped.replay)
    after.replay.sample(TOKENS)  # the state includes the random generator
    after.resume(tensors, json.loads(json.dumps(state)))
    assert (after.counters, after.next_candidate) == (straight.counters, straight.next_candidate)
    losses = [[it.step(TOKENS, LocalExecutor()).step.loss for _ in range(10)] for it in (straight, after)]
    assert losses[0] == losses[1]
    assert torch.equal(weights(straight), weights(after))


def test_resume_with_a_smaller_interval_applies_it():
    it = fed()
    it.step(TOKENS, LocalExecutor())
    after = learner(steps_per_candidate=5)
    after.resume(*it.state())
    assert after.next_candidate == 6


def test_resume_of_a_foreign_state_is_refused():
    it = fed()
    it.step(TOKENS, LocalExecutor())
    tensors, state = it.state()
    with pytest.raises(DistillerError, match="cannot be read"):
        learner().resume(tensors, {name: value for name, value in state.items() if name != "next_gate"})
    with pytest.raises((DistillerError, DrafterError)):
        learner(Toy(draft_ids=torch.arange(3))).resume(tensors, state)


def decision(candidate, baseline, passed=True):
    first, second = (gate_figures((0.5,), divergence=value) for value in (candidate, baseline))
    return GateDecision(passed, False, "", first, second)


def trigger(resumed=False, **settings):
    it = TrainingTrigger(TrainerSettings(**settings))
    if resumed:
        it.on_resume()
    return it


def exhausted(it):
    """Let the trigger count all passes over its records."""
    it.on_step(10**9)
    return it


def test_trigger_waits_for_the_first_candidate():
    it = trigger()
    it.on_records(10)
    assert exhausted(it).due(0, 0.0)


def test_trigger_runs_while_candidates_improve():
    it = exhausted(trigger())
    it.on_decision(decision(1.0, 2.0), held_out=5)
    assert it.due(0, 0.0)
    it.on_decision(decision(0.9, 1.0), held_out=5)
    assert it.due(0, 1.0)
    it.on_decision(decision(0.899, 0.9), held_out=5)
    assert not it.due(0, 2.0)
    assert not it.due(0, 1e6)


def test_trigger_compares_with_rejected_candidates_too():
    it = exhausted(trigger())
    it.on_decision(decision(0.8, 1.0, passed=False), held_out=5)
    assert it.due(0, 0.0)
    it.on_decision(decision(0.85, 1.0, passed=False), held_out=5)
    assert not it.due(0, 1.0)


def test_trigger_compares_only_equal_held_out_records():
    it = exhausted(trigger())
    it.on_decision(decision(0.2, 1.0), held_out=5)
    it.on_decision(decision(0.85, 1.0), held_out=6)
    assert it.due(0, 0.0)


def test_trigger_stops_without_a_finite_decision():
    it = exhausted(trigger())
    it.on_decision(GateDecision(False, True, "not enough held-out records"), held_out=0)
    assert not it.due(0, 0.0)
    it = exhausted(trigger())
    it.on_decision(decision(float("nan"), 1.0), held_out=0)
    assert not it.due(0, 0.0)


def test_trigger_gives_new_records_their_passes():
    it = exhausted(trigger())
    it.on_decision(decision(1.0, 1.0), held_out=5)
    assert not it.due(0, 0.0)
    it.on_records(10)
    assert it.due(1, 1.0)
    it.on_step(10 * PASSES - 1)
    assert it.due(0, 2.0)
    it.on_step(1)
    assert not it.due(0, 3.0)


def test_trigger_starts_at_the_number_of_records():
    it = trigger(resumed=True, trigger_records=4, trigger_seconds=1000)
    it.on_records(100)
    assert [it.due(fresh, float(fresh)) for fresh in (1, 2, 3, 4)] == [False, False, False, True]
    assert it.due(0, 5.0)
    assert not exhausted(it).due(0, 6.0)
    assert not it.due(3, 7.0)


def test_trigger_starts_after_the_maximum_wait():
    it = trigger(resumed=True, trigger_records=100, trigger_seconds=30)
    assert not it.due(0, 0.0)
    assert not it.due(1, 500.0)
    assert not it.due(2, 529.0)
    assert it.due(2, 530.0)


def test_drift_during_an_update_starts_another():
    it = trigger(trigger_records=100, trigger_seconds=1e6)
    it.on_drift()
    assert it.due(0, 0.0), "the first candidate has not been proposed yet"
    it.on_resume()
    assert it.due(1, 1.0)


def test_drift_starts_an_update_with_the_next_record():
    it = trigger(resumed=True, trigger_records=100, trigger_seconds=1e6)
    it.on_drift()
    assert not it.due(0, 0.0)
    assert it.due(1, 1.0)
    assert not exhausted(it).due(0, 2.0)
    assert not it.due(1, 3.0)
