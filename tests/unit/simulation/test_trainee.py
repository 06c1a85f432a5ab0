"""A drafter in training keeps to the learner's rules."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import simpy

from osd.config import DomainsAssumed, Settings, TrainersAssumed, TrainerSettings
from osd.demand import Demand, Workload
from osd.learning.online import PASSES
from osd.learning.value import SLICE
from osd.simulation.knowledge import Knowledge
from osd.simulation.trainee import Trainee
from osd.simulation.training_process import TrainingProcess

ASSUMED = DomainsAssumed(gain=0.8, tokens=10_000, gate_error=0.0)


def trainee(**changed) -> Trainee:
    settings = TrainerSettings(**{"steps_per_candidate": 100, "micro_batch_tokens": 100, "min_records": 3} | changed)
    return Trainee(settings, ASSUMED, Knowledge(ASSUMED, 0), np.random.default_rng(0))


def fed(one: Trainee, records: int, acceptance: float = 0.5) -> Trainee:
    for _ in range(records):
        one.arrive(100, 1.0, 1.0, acceptance)
    return one


def test_nothing_is_trained_before_there_are_enough_records():
    one = trainee()
    assert not one.ready
    assert not fed(one, 2).ready
    assert fed(one, 1).ready


def test_the_first_candidate_comes_after_a_slice_and_further_ones_after_as_many_steps():
    one = fed(trainee(), 40)
    one.learn(2000, SLICE - 1)
    assert not one.due
    one.learn(100, 1)
    assert one.due
    assert one.judge(3.0) is not None
    one.learn(9999, 50)
    assert not one.due
    one.learn(1, 0.01)
    assert one.due


def test_a_gate_waits_for_enough_to_judge_by_and_is_tried_again_soon():
    one = fed(trainee(), 3)  # a third of 300 tokens is held out, and 256 are needed
    one.learn(10_000, 60)
    assert one.due
    assert one.judge(3.0) is None
    assert (one.gates, one.published.number) == (0, 1)
    assert one.candidate_due == one.trained + 100 * 100 / 5


def test_a_version_has_what_was_learnt_and_a_candidate_that_is_worse_is_none():
    one = fed(trainee(), 40)
    one.learn(10_000, 60)
    version = one.judge(3.0)
    assert version.level == pytest.approx(0.8 * (1 - np.exp(-1)))
    assert one.value.length == pytest.approx(ASSUMED.length + version.level)
    one.knowledge.trained = 0.0  # what is in training is worth nothing any more
    one.learn(10, 1)
    assert one.judge(3.0) is None
    assert one.published == version


def test_each_new_token_is_trained_on_eight_times_and_then_only_while_that_gains_something():
    one = fed(trainee(), 40)
    one.knowledge.trained = 1e9  # there is nothing more to gain
    one.learn(1, 60)
    one.judge(3.0)
    one.learn(1, 60)
    one.judge(3.0)
    # A third was held out until 512 tokens were, a tenth after that.
    trained_on = 16 * 100 * 2 / 3 + 24 * 100 * 0.9
    one.learn(PASSES * trained_on - 3, 60)
    assert one.ready
    one.learn(2, 1)
    assert not one.ready


def test_a_fall_of_acceptance_begins_the_curve_anew_after_some_records():
    one = fed(trainee(), 40)
    one.learn(10_000, 60)
    one.judge(3.0)
    fed(one, 60)
    assert one.value.seconds == 60
    alarms = one.value.horizon.alarms
    fed(one, 40, acceptance=0.2)
    assert one.value.horizon.alarms == alarms + 1
    assert one.value.seconds == 0
    one = fed(trainee(), 100)
    while not one.value.horizon.alarms:
        fed(one, 1, acceptance=0.1)
    one.learn(100, SLICE)
    assert one.judge(3.0) is None, "what came before the fall judges no more"


def test_parts_of_records_are_counted_when_they_make_a_whole_one():
    one = trainee()
    for _ in range(10):
        one.arrive(100, 0.25, 1.0, 0.5)
    assert one.records == 2


def test_records_of_a_sample_make_the_curve_stale_by_what_they_stand_for():
    one = fed(trainee(drift_records=1000), 20)
    one.learn(10_000, 60)
    for _ in range(9):
        one.arrive(100, 1.0, 100.0, 0.5)
    assert one.value.seconds == 60
    one.arrive(100, 1.0, 100.0, 0.5)
    assert one.value.seconds == 0


def test_the_states_of_all_records_are_wanted_and_of_few_where_nobody_trains():
    one = trainee(held_out=0.2)
    assert one.wanted == one.states(one.wanted) == 1
    fed(one, 200)
    assert one.wanted == 0.1
    assert one.states(0.1) == pytest.approx(0.8 * 0.1 + 0.2 * 0.5)  # more of those that judge
    one.learn(100 * 400, 10)  # a half of it on what was never trained on
    assert one.wanted == 1


def test_states_are_wanted_of_fewer_records_where_training_would_not_pay():
    one = fed(trainee(held_out=0.2), 20)
    assert one.wanted == 1
    one.pays = False
    assert one.wanted < 0.5


def trains(one: Trainee, settings: Settings, work: Workload, spare: float, beside: bool, idle: float = 0.0) -> bool:
    """Whether a trainer trains a domain of this workload in its first second, beside requests or not."""
    service = SimpleNamespace(
        spare=lambda n: spare, beside_requests=lambda n: beside, workload=lambda domain: work, idle=lambda n: idle
    )
    env = simpy.Environment()
    training = TrainingProcess(
        0, env, settings, TrainersAssumed(dedicated=False), {0: one}, service, 100.0, 1, lambda version: None
    )  # fmt: skip
    env.process(training.run(1.0))
    env.run(until=1.5)
    return bool(training.seconds)


@pytest.mark.parametrize(("price", "pays"), [(0.0, True), (1e9, False)])
def test_whoever_trains_says_whether_that_pays(price, pays):
    one = fed(trainee(), 20)
    one.pays = not pays
    work = Workload(1.0, Demand(((0, 1, 1.0),), 100.0, 0.0), ((0.01, 0.011, 0.012),))
    assert trains(one, Settings(trainer=TrainerSettings(price_idle=price)), work, 1.0, beside=False) is pays
    assert one.pays is pays


@pytest.mark.parametrize(("idle", "trained"), [(0.0, True), (1.0, False)])
def test_beside_requests_it_waits_where_idle_moments_are_frequent(idle, trained):
    one = fed(trainee(), 20)
    work = Workload(0.9, Demand(((0, 1, 1.0),), 100.0, 0.0), ((0.01, 0.0101, 0.0102, 0.0103),))
    one.value.horizon.passed(80_000)
    assert trains(one, Settings(), work, 0.2, beside=True, idle=idle) is trained
    assert one.pays


def test_what_has_no_states_is_watched_and_gives_nothing_to_train_on():
    one = trainee()
    for _ in range(1000):
        one.arrive(100, 1.0, 1.0, 0.5, 0.1)
    assert one.records == 1000
    one.learn(PASSES * 100 * 100, 1)
    one.judge(3.0)
    one.judge(3.0)  # nothing gained since
    assert not one.ready
