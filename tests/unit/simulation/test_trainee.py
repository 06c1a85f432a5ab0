"""Simulated training of a drafter, with the rules of the learner."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from osd.config import DomainAssumptions, Settings, TrainerAssumptions, TrainerSettings
from osd.learning.online import FIRST_SECONDS, PASSES
from osd.simulation.knowledge import DomainKnowledge
from osd.simulation.trainee import Trainee
from osd.simulation.training_process import TrainingProcess

ASSUMED = DomainAssumptions(gain=0.8, tokens=10_000, gate_error=0.0)


def trainee(**changed) -> Trainee:
    settings = TrainerSettings(**{"steps_per_candidate": 100, "micro_batch_tokens": 100, "min_records": 3} | changed)
    return Trainee(settings, ASSUMED, DomainKnowledge(ASSUMED, 0), np.random.default_rng(0))


def fed(learner: Trainee, records: int, acceptance: float = 0.5) -> Trainee:
    for _ in range(records):
        learner.arrive(100, 1.0, 1.0, acceptance)
    return learner


def test_training_waits_for_enough_records():
    learner = trainee()
    assert not learner.ready
    assert not fed(learner, 2).ready
    assert fed(learner, 1).ready


def test_candidate_is_due_after_a_slice_then_after_steps():
    learner = fed(trainee(), 40)
    learner.learn(2000, FIRST_SECONDS - 1)
    assert not learner.due
    learner.learn(100, 1)
    assert learner.due
    assert learner.judge(3.0) is not None
    learner.learn(9999, 50)
    assert not learner.due
    learner.learn(1, 0.01)
    assert learner.due


def test_gate_without_enough_positions_is_soon_repeated():
    learner = fed(trainee(), 3)  # a third of 300 tokens is held out; the gate needs 256
    learner.learn(10_000, 60)
    assert learner.due
    assert learner.judge(3.0) is None
    assert (learner.gates, learner.published.number) == (0, 1)
    assert learner.candidate_due == learner.trained + 100 * 100 / 5


def test_worse_candidate_is_not_published():
    learner = fed(trainee(), 40)
    learner.learn(10_000, 60)
    version = learner.judge(3.0)
    assert version.level == pytest.approx(0.8 * (1 - np.exp(-1)))
    assert learner.promised == pytest.approx(np.log(1 + version.level / ASSUMED.length))
    assert [served.number for served in learner.fund.versions] == [2]
    learner.knowledge.trained = 0.0  # the drafter in training has become worthless
    learner.learn(10, 1)
    assert learner.judge(3.0) is None
    assert learner.published == version


def test_training_stops_after_all_passes_without_gain():
    learner = fed(trainee(), 40)
    learner.knowledge.trained = 1e9  # no gain is left
    learner.learn(1, 60)
    learner.judge(3.0)
    learner.learn(1, 60)
    learner.judge(3.0)
    # A third was held out up to 512 held-out tokens, then a tenth.
    trained_on = 16 * 100 * 2 / 3 + 24 * 100 * 0.9
    learner.learn(PASSES * trained_on - 3, 60)
    assert learner.ready
    learner.learn(2, 1)
    assert not learner.ready


def test_parts_of_records_add_up_to_whole_records():
    learner = trainee()
    for _ in range(10):
        learner.arrive(100, 0.25, 1.0, 0.5)
    assert learner.records == 2


def test_wanted_share_falls_while_fresh_records_wait():
    learner = trainee(held_out=0.2)
    assert learner.wanted_share == learner.states_share(learner.wanted_share) == 1
    fed(learner, 200)
    assert learner.wanted_share == 0.1
    assert learner.states_share(0.1) == pytest.approx(0.8 * 0.1 + 0.2 * 0.5)  # held-out records have states more often
    learner.learn(100 * 400, 10)  # half of it on new records
    assert learner.wanted_share == 1


def test_records_without_states_are_not_trained_on():
    learner = trainee()
    for _ in range(1000):
        learner.arrive(100, 1.0, 1.0, 0.5, 0.1)
    assert learner.records == 1000
    learner.learn(PASSES * 100 * 100, 1)
    learner.judge(3.0)
    learner.judge(3.0)  # no gain since
    assert not learner.ready


def test_fall_of_acceptance_resets_the_fund():
    learner = fed(trainee(), 40)
    learner.learn(10_000, 60)
    learner.judge(3.0)
    fed(learner, 60)
    assert (learner.seconds, len(learner.fund.versions)) == (60, 1)
    fed(learner, 40, acceptance=0.2)
    assert (learner.seconds, learner.promised, learner.fund.versions) == (0, None, [])
    learner = fed(trainee(), 100)
    learner.learn(100, 5.0)
    while learner.seconds:
        fed(learner, 1, acceptance=0.1)
    learner.learn(100, FIRST_SECONDS)
    assert learner.judge(3.0) is None, "the gate must not use records from before the fall"


def test_wanted_share_falls_while_the_fund_is_empty():
    learner = fed(trainee(held_out=0.2), 20)
    assert learner.wanted_share == 1
    learner.is_funded = False
    assert learner.wanted_share < 0.5


def test_trials_measure_the_gain_and_fill_the_fund():
    learner = fed(trainee(), 40)
    learner.learn(10_000, 60)
    learner.judge(3.0)
    learner.serve(30.0, lambda before, after: 0.1)
    assert learner.fund.certain == 0, "too few trials"
    for _ in range(100):
        learner.serve(60.0, lambda before, after: 0.1)
    (version,) = learner.fund.versions
    assert version.log == pytest.approx(0.1, abs=0.01)
    assert 0.5 * learner.fund.saved < learner.fund.certain < learner.fund.saved


class Replicas:
    """Replicas of a trainer's machine, all busy for a single domain, with running requests if ``requests``."""

    def __init__(self, env, requests, share=1.0):
        self.env, self.requests, self.share = env, requests, share

    def spare(self, trainer):
        return 0.2 if self.requests else 1.0

    def has_requests(self, trainer):
        return self.requests

    def busy(self, domain):
        return self.share * self.env.now

    def gain(self, before, after):
        return 0.0


def train(learner, seconds, requests, **trainer):
    env = simpy.Environment()
    training = TrainingProcess(
        0, env, Settings(trainer=TrainerSettings(**trainer)), TrainerAssumptions(dedicated=False), {0: learner},
        Replicas(env, requests), 100.0, 1, lambda version: None,
    )  # fmt: skip
    env.process(training.run(1.0))
    env.run(until=seconds)
    return training.seconds


def test_training_is_free_when_idle_and_paid_otherwise():
    assert train(fed(trainee(), 4000), 1000, requests=False) > 900
    learner = fed(trainee(), 4000)
    assert 10 < train(learner, 1000, requests=True) < 60
    assert not learner.is_funded
    assert train(fed(trainee(), 4000), 1000, requests=True, price=0.0) > 150


def test_useless_training_costs_at_most_the_allowed_share():
    learner = fed(trainee(steps_per_candidate=15), 100_000)
    learner.knowledge.trained = 1e9
    spent = train(learner, 20_000, requests=True)
    assert spent == pytest.approx(learner.fund.spent)
    assert spent < 2 * learner.fund.mean_slice + 0.005 * 20_000
