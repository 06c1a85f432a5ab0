from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import TrainerSettings
from osd.economy.report import RECALL_ALONE, Measured
from osd.learning.drift import Drift
from osd.learning.gate import GateDecision
from osd.registry.training import VersionEffect
from osd.registry.versions import Version
from tests.unit.learning.toys import Toy, gate_figures
from tests.unit.trainer.traffic import live
from trainer import publisher as module
from trainer.canary import CanaryTrial, Judgement
from trainer.publisher import NotYetError, Publisher, Revision, StoppedError, version_effect
from trainer.rollout import CandidateOutcome


@pytest.mark.parametrize(("manifest", "before"), [
    ({"target": "new", "gate": {"acceptance": 0.5}}, None),
    ({"gate": {"acceptance": 0.5}}, None),
    ({"target": "old"}, None),
    ({"target": "old", "gate": {"acceptance": 0.5}}, 0.5),
])  # fmt: skip
def test_revision_exists_for_a_version_of_another_target(manifest, before):
    revision = Revision.of(Version(3, {}, {}, manifest), "new")
    assert revision == (None if before is None else Revision(3, before))


@pytest.mark.parametrize(("now", "falls"), [(0.6, False), (0.45, False), (0.35, True), (math.nan, True)])
def test_revision_drift_needs_a_large_fall_or_nan(now, falls):
    drift = Revision(3, 0.5).drift(gate_figures((now,)), 0.1, "general")
    assert (drift is not None) is falls
    if drift is not None:
        assert (drift.domain, drift.version, drift.before) == ("general", 3, 0.5)


@pytest.fixture
def parts(monkeypatch):
    """Publisher with mocks of its parts, at ``clock.now`` seconds; ``spare`` returns whether the worker continues."""
    names = ("promotion", "budget", "reporter", "upstreams", "effects", "spare", "learner", "clock")
    parts = SimpleNamespace(**{name: MagicMock() for name in names})
    monkeypatch.setattr(module.time, "monotonic", lambda: parts.clock.now)
    parts.clock.now, parts.promotion.stable, parts.promotion.versions.domain = 100.0, 1, "general"
    parts.promotion.baseline = Toy()
    parts.learner.due, parts.learner.gate.divergence, parts.upstreams.new.return_value = True, "forward_kl", []
    parts.publisher = Publisher(
        parts.promotion, TrainerSettings(), "new", parts.budget, parts.reporter, parts.upstreams, parts.effects,
        parts.spare,
    )  # fmt: skip
    return parts


@pytest.mark.parametrize(("lease", "failure", "reason"), [
    (False, None, "another trainer trains general"),
    (True, RedisConnectionError("gone"), "Redis cannot be reached: gone"),
    (True, OSError("full"), "the registry cannot be read or written: full"),
    (True, None, "the registry has no stable drafter version of general yet"),
])  # fmt: skip
def test_acquire_version_failure_gives_the_reason(parts, lease, failure, reason):
    parts.promotion.versions.lease.take.return_value = lease
    parts.promotion.load_stable.configure_mock(side_effect=failure, return_value=None)
    with pytest.raises(NotYetError, match=f"^{reason}$"):
        parts.publisher.acquire_version()
    assert parts.promotion.load_stable.called is lease, "the version of another trainer is not loaded"


@pytest.mark.parametrize("traced", [False, True])
def test_traced_upstream_is_remembered_for_the_stable_version(parts, traced):
    parts.upstreams.traced, trace = traced, live(np.random.default_rng(0), 1, 0.5)
    parts.publisher.observe(trace, parts.learner)
    parts.promotion.watch.observe.assert_called_once_with(trace, traced)


@pytest.mark.parametrize(("error", "seconds"), [(RedisConnectionError("gone"), 2.0), (OSError("full"), 10.0)])
def test_failed_publication_is_retried_later(parts, caplog, error, seconds):
    parts.promotion.propose.side_effect = error
    for _ in range(2):
        assert parts.publisher.due(parts.learner)
        assert not parts.publisher.propose(parts.learner)
        parts.clock.now += seconds - 0.5
        assert not parts.publisher.due(parts.learner)
        parts.clock.now += 0.5
    assert not parts.learner.on_decision.called
    assert len(caplog.records) == (2 if seconds == 2.0 else 1), "a full disk is logged once"


@pytest.mark.parametrize("gain", [0.0, 0.014, 0.016])
def test_candidate_with_a_gain_below_one_percent_is_rejected(parts, gain):
    after = gate_figures((0.5 + gain,))
    parts.learner.gate.judge.return_value = GateDecision(True, False, "better", after, gate_figures((0.5,)))
    parts.promotion.propose.return_value = CandidateOutcome(GateDecision(False, True, "pinned"), None)
    parts.publisher.propose(parts.learner)
    _, judge, _ = parts.promotion.propose.call_args.args
    assert judge(Toy(), Toy()).passed is (gain > 0.015)


@pytest.mark.parametrize(("decision", "version", "rejected"), [
    (GateDecision(True, False, "better"), 2, 0),
    (GateDecision(False, False, "worse"), None, 1),
    (GateDecision(False, True, "pinned"), None, 0),
])  # fmt: skip
def test_propose_counts_the_outcome_and_informs_the_learner(parts, decision, version, rejected):
    parts.promotion.propose.return_value, parts.reporter.state.rejected = CandidateOutcome(decision, version), 0
    parts.learner.log_gain = 0.1
    assert parts.publisher.propose(parts.learner)
    parts.learner.on_decision.assert_called_once_with(decision)
    assert parts.reporter.fund.end_slice.called is not decision.waits
    parts.reporter.fund.follow.assert_called_once_with(1, 0.0)
    assert parts.budget.investor.charge_swap.called is (version is not None)
    assert parts.reporter.state.rejected == rejected
    assert parts.reporter.record_publication.call_args_list == ([] if version is None else [((1,),)])


def test_evaluation_ends_when_the_worker_must_end(parts):
    parts.learner.catch_up.side_effect, parts.learner.held_out.return_value = [True, False], ["x", "y"]
    parts.spare.side_effect = [True, True, True, False]
    parts.learner.gate.judge.side_effect = lambda candidate, baseline, batches: list(batches())
    parts.promotion.propose.side_effect = lambda candidate, judge, describe: judge(candidate, Toy())
    with pytest.raises(StoppedError):
        parts.publisher.propose(parts.learner)
    assert parts.budget.working.call_count == 3
    assert parts.learner.catch_up.call_count == 2


@pytest.mark.parametrize(("now", "drift"), [(0.45, None), (0.3, Drift("general", 3, 0.5, 0.3))])
def test_training_waits_until_the_revision_is_evaluated(parts, now, drift):
    learner = parts.learner
    learner.counters.held_out, learner.gate.evaluate.return_value = 1, None
    parts.publisher.start_training(Version(3, {}, {}, {"target": "old", "gate": {"acceptance": 0.5}}), False)
    assert not parts.publisher.may_train(learner)
    learner.gate.evaluate.return_value = gate_figures((now,))
    assert not parts.publisher.may_train(learner), "no new held-out positions since the last evaluation"
    learner.counters.held_out = 2
    assert parts.publisher.may_train(learner)
    assert learner.on_drift.call_args_list == ([] if drift is None else [((drift,),)])
    assert learner.trigger.on_resume.called is (drift is None)
    assert parts.publisher.may_train(learner)
    assert parts.promotion.versions.record_event.call_count == 1


@pytest.mark.parametrize("manifest", [{}, {"target": "old", "gate": {"acceptance": 0.5}}])
def test_training_starts_at_once_on_the_same_target(parts, manifest):
    parts.learner.counters.held_out, parts.learner.gate.evaluate.return_value = 1, None
    parts.publisher.start_training(Version(3, {}, {}, manifest), bool(manifest))
    assert parts.publisher.may_train(parts.learner)


def test_canary_is_judged_twice_a_second(parts):
    parts.upstreams.new.return_value = ["evidence"]
    parts.promotion.watch.canary.figures.return_value = {"requests": 4}
    parts.effects.of.return_value = Measured(20, 1.0, 1.1)
    parts.promotion.decide.side_effect = [RedisConnectionError("gone"), Judgement("promote", "better")]
    parts.publisher.decide_canary()
    parts.publisher.decide_canary()
    assert parts.promotion.decide.call_count == 1
    parts.clock.now += 0.5
    parts.publisher.decide_canary()
    assert parts.promotion.watch.count.call_count == 3
    assert parts.promotion.watch.canary.measured == Measured(20, 1.0, 1.1)
    assert parts.reporter.state.canary == {"requests": 4, "action": "promote", "reason": "better"}


def test_trial_effect_reaches_the_fund_and_the_report(parts):
    measured = Measured(40, 100.0, 110.0, 0.25)
    canary = CanaryTrial(2, 1, 0.5, 1e9)
    parts.promotion.watch.canary, parts.effects.of.return_value = canary, measured
    parts.promotion.decide.return_value = None
    parts.publisher.decide_canary()
    parts.publisher.update_reports()
    parts.reporter.fund.measure.assert_called_with({2: measured})
    assert parts.reporter.trial == VersionEffect(2, 1, measured.effect.log, measured.effect.width, 40)
    parts.promotion.watch.canary = None
    parts.publisher.update_reports()
    assert parts.reporter.trial is None


BETTER, WORSE, UNCERTAIN = (Measured(40, 100.0, plain, 0.25) for plain in (110.0, 90.0, 99.0))


@pytest.mark.parametrize(("measured", "loses"), [(BETTER, False), (WORSE, True), (UNCERTAIN, False)])
def test_version_in_service_is_taken_back_when_it_loses(parts, measured, loses):
    parts.promotion.parent, parts.promotion.watch.canary = 7, None
    parts.promotion.stable, parts.effects.of.return_value = 8, measured
    parts.publisher.follow_effect()
    assert parts.effects.of.call_args_list == [((8, RECALL_ALONE),), ((8, 7),)]
    assert parts.reporter.over_recall == version_effect(8, RECALL_ALONE, measured)
    parts.reporter.fund.measure_mixed.assert_called_with(measured)
    assert parts.promotion.take_back.call_args_list == ([((measured.effect,),)] if loses else [])
    parts.publisher.update_reports()
    parts.reporter.fund.measure.assert_called_with({8: measured})


def test_new_version_that_rests_is_reported_before_it_is_measured():
    assert version_effect(8, RECALL_ALONE, Measured(guarded=2)) == VersionEffect(8, RECALL_ALONE, resting=2)
    assert version_effect(8, RECALL_ALONE, replace(WORSE, guarded=1)).resting == 1


def test_version_is_taken_back_when_redis_answers_again(parts):
    parts.promotion.watch.canary, parts.effects.of.return_value = None, WORSE
    parts.promotion.take_back.side_effect = [RedisConnectionError("gone"), None]
    for _ in range(2):
        parts.publisher.follow_effect()
    assert parts.promotion.take_back.call_count == 2


@pytest.mark.parametrize("measured", [None, Measured(), Measured(3, 100.0, 110.0, 0.25)])
def test_trial_without_enough_pairs_has_no_interval(measured):
    assert version_effect(2, 1, measured).width is None
