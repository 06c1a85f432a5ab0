"""A drafter in training keeps to the learner's rules."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from osd.config import DomainsAssumed, Settings, TrainersAssumed, TrainerSettings
from osd.learning.online import FIRST_SECONDS, PASSES
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
    one.learn(2000, FIRST_SECONDS - 1)
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
    assert one.promised == pytest.approx(np.log(1 + version.level / ASSUMED.length))
    assert [served.number for served in one.fund.versions] == [2]
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


def test_parts_of_records_are_counted_when_they_make_a_whole_one():
    one = trainee()
    for _ in range(10):
        one.arrive(100, 0.25, 1.0, 0.5)
    assert one.records == 2


def test_the_states_of_all_records_are_wanted_and_of_few_where_nobody_trains():
    one = trainee(held_out=0.2)
    assert one.wanted == one.states(one.wanted) == 1
    fed(one, 200)
    assert one.wanted == 0.1
    assert one.states(0.1) == pytest.approx(0.8 * 0.1 + 0.2 * 0.5)  # more of those that judge
    one.learn(100 * 400, 10)  # a half of it on what was never trained on
    assert one.wanted == 1


def test_what_has_no_states_is_watched_and_gives_nothing_to_train_on():
    one = trainee()
    for _ in range(1000):
        one.arrive(100, 1.0, 1.0, 0.5, 0.1)
    assert one.records == 1000
    one.learn(PASSES * 100 * 100, 1)
    one.judge(3.0)
    one.judge(3.0)  # nothing gained since
    assert not one.ready


def test_a_fall_of_acceptance_begins_anew_after_some_records():
    one = fed(trainee(), 40)
    one.learn(10_000, 60)
    one.judge(3.0)
    fed(one, 60)
    assert (one.seconds, len(one.fund.versions)) == (60, 1)
    fed(one, 40, acceptance=0.2)
    assert (one.seconds, one.promised, one.fund.versions) == (0, None, [])
    one = fed(trainee(), 100)
    one.learn(100, 5.0)
    while one.seconds:
        fed(one, 1, acceptance=0.1)
    one.learn(100, FIRST_SECONDS)
    assert one.judge(3.0) is None, "what came before the fall judges no more"


def test_states_are_wanted_of_fewer_records_while_the_fund_covers_nothing():
    one = fed(trainee(held_out=0.2), 20)
    assert one.wanted == 1
    one.begins = False
    assert one.wanted < 0.5


def test_trials_find_the_true_gain_of_a_version_and_fill_the_fund():
    one = fed(trainee(), 40)
    one.learn(10_000, 60)
    one.judge(3.0)
    one.serve(30.0, lambda before, after: 0.1)
    assert one.fund.certain == 0, "too few trials"
    for _ in range(100):
        one.serve(60.0, lambda before, after: 0.1)
    (version,) = one.fund.versions
    assert version.log == pytest.approx(0.1, abs=0.01)
    assert 0.5 * one.fund.saved < one.fund.certain < one.fund.saved


class Replicas:
    """Replicas of a trainer's machine, all busy for one domain with ``beside`` requests."""

    def __init__(self, env, beside, share=1.0):
        self.env, self.beside, self.share = env, beside, share

    def spare(self, trainer):
        return 0.2 if self.beside else 1.0

    def beside_requests(self, trainer):
        return self.beside

    def busy(self, domain):
        return self.share * self.env.now

    def gain(self, before, after):
        return 0.0


def trained(one, seconds, beside, **trainer):
    env = simpy.Environment()
    training = TrainingProcess(
        0, env, Settings(trainer=TrainerSettings(**trainer)), TrainersAssumed(dedicated=False), {0: one},
        Replicas(env, beside), 100.0, 1, lambda version: None,
    )  # fmt: skip
    env.process(training.run(1.0))
    env.run(until=seconds)
    return training.seconds


def test_training_is_free_in_idle_moments_and_paid_from_the_fund_beside_requests():
    assert trained(fed(trainee(), 4000), 1000, beside=False) > 900
    one = fed(trainee(), 4000)
    assert 10 < trained(one, 1000, beside=True) < 60
    assert not one.begins
    assert trained(fed(trainee(), 4000), 1000, beside=True, price=0.0) > 150


def test_useless_training_beside_requests_costs_at_most_a_version_and_the_allowed_share():
    one = fed(trainee(steps_per_candidate=15), 100_000)
    one.knowledge.trained = 1e9
    spent = trained(one, 20_000, beside=True)
    assert spent == pytest.approx(one.fund.spent)
    assert spent < 2 * one.fund.version + 0.005 * 20_000
