from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import TrainerSettings
from osd.economy.report import RECALL_ALONE, Measured
from osd.economy.training import Decision
from osd.learning.distiller import Distiller, MicroStep
from osd.learning.gate import Gate
from osd.learning.online import Learner, LearnerStep, empty_replay
from osd.registry.pointer_file import FencedError
from osd.registry.training import FundReport, Training, VersionEffect
from tests.clocks import Clock
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace
from trainer.reporter import CostMeter, TrainingReporter
from trainer.state import TrainingCost

BEGINS, WAITS = Decision(True, 12.0, 5.0), Decision(False, 1.2, 5.0)


class StoredReports:
    """Reports of training in memory."""

    def __init__(self, stored=None):
        self.stored, self.is_down, self.writes = stored, False, 0

    def get(self, domain):
        if self.is_down:
            raise RedisConnectionError("gone")
        return self.stored

    def set(self, domain, value):
        if self.is_down:
            raise RedisConnectionError("gone")
        self.stored = {domain: value}
        self.writes += 1


@pytest.fixture
def clock():
    return Clock()


def test_version_costs_all_seconds_since_the_last_version(clock):
    meter = CostMeter(clock)
    clock.now += 5
    meter.charge(contended=2.0, lost=1.0)
    assert meter.current() == TrainingCost(cpu=5.0, contended=2.0, slowed=1.0, unpublished=6.0)
    meter.start_version()
    clock.now += 3
    assert meter.current() == TrainingCost(cpu=8.0, contended=2.0, slowed=1.0, unpublished=3.0)
    assert meter.current().total == 9.0


@pytest.mark.parametrize(
    ("reported", "before"),
    [
        (Training(), TrainingCost(6.0, 3.0, 1.0, 2.0)),
        (Training(cpu_seconds=8.0, beside_seconds=4.0, slowed_seconds=2.0), TrainingCost(8.0, 4.0, 2.0, 5.0)),
    ],
)
def test_resume_takes_the_larger_of_checkpoint_and_report(clock, reported, before):
    meter = CostMeter(clock)
    clock.now += 2
    meter.charge(lost=1.0)
    meter.resume(TrainingCost(6.0, 3.0, 1.0, 2.0), reported)
    assert meter.current() == TrainingCost(before.cpu + 2, before.contended, before.slowed + 1, before.unpublished + 3)


def test_cost_is_the_cpu_time_of_all_threads():
    meter, began = CostMeter(), time.monotonic()
    time.sleep(0.2)
    assert meter.current().total < 0.5 * (time.monotonic() - began)
    deadline = time.process_time() + 0.15

    def burn():
        while time.process_time() < deadline:
            pass

    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert meter.current().total >= 0.15


@contextmanager
def taken_over():
    raise FencedError("another trainer has taken over")
    yield


class Scene:
    """Reporter of one domain, with its learner and its events."""

    def __init__(self, clock, reports=None, held=nullcontext):
        settings = TrainerSettings(min_records=1)
        self.clock, self.reports, self.events = clock, reports or StoredReports({}), []
        self.learner = Learner(
            Distiller(Toy(), settings), settings, Gate(3, "forward_kl"), VOCABULARY, empty_replay(settings)
        )
        self.versions = SimpleNamespace(
            domain="general",
            lease=SimpleNamespace(held=held),
            record_event=lambda kind, version, **figures: self.events.append((kind, figures)),
        )
        self.reporter = self.successor()

    def successor(self, mixes=False):
        return TrainingReporter(self.versions, CostMeter(lambda: 7.0), self.reports, clock=self.clock, mixes=mixes)

    def report(self, reporter=None, decision=None):
        self.clock.now += 1
        (reporter or self.reporter).report(self.learner, decision, lambda learner: 0.25)
        return self.reports.stored.get("general")

    def record_step(self, loss=0.5, skipped=False, name="r"):
        self.reporter.record_step(self.learner, LearnerStep(MicroStep(loss, skipped), 30, [(name, 0)]))


@pytest.fixture
def scene(clock):
    return Scene(clock)


def test_report_has_counts_costs_and_account(scene):
    state = scene.reporter.state
    scene.learner.distiller.steps, scene.learner.distiller.skipped, scene.learner.counters.tokens = 5, 3, 600
    state.published, state.rejected, state.refused, state.drifts, state.loss = 1, 2, 4, 6, 0.5
    state.lag, state.lag_seconds = 7, 8.0
    state.set("waiting", "every record was used")
    traces = [make_trace(f"r{number}", seed=number) for number in range(3)]
    held = sum(scene.learner.add(trace).part == "held_out" for trace in traces)
    scene.reporter.cost.charge(contended=1.0, lost=2.0)
    report = scene.report(decision=BEGINS)
    assert report == Training(
        steps=5, skipped=3, positions=600, records=3, held_out=held, refused=4, passed=1, rejected=2, drifts=6,
        beside_seconds=1.0, slowed_seconds=2.0,
        replay_records=3, replay_tokens=36, replay_bytes=sum(trace.nbytes for trace in traces),
        lag=7, lag_seconds=8.0, loss=0.5, state="waiting", detail="every record was used",
        account=FundReport(begins=True, fund=12.0, needed=5.0, worth=0.25), states_wanted=1.0,
    )  # fmt: skip
    assert report.activity == "waiting: every record was used"
    status = scene.reporter.status(scene.learner)
    assert (status["steps"], status["tokens"], status["records"], status["published"]) == (5, 600, 3, 1)


def test_reported_counts_never_fall(scene):
    distiller, state = scene.learner.distiller, scene.reporter.state
    distiller.steps, state.rejected = 50, 4
    scene.report()
    distiller.steps = 30
    successor = scene.successor()
    successor.state.rejected = 5
    report = scene.report(successor)
    assert (report.steps, report.rejected) == (50, 5)
    scene.reports.stored.clear()
    distiller.steps = 40
    assert scene.report(successor).steps == 50
    distiller.steps = 60
    assert scene.report(successor).steps == 60


def test_report_waits_for_the_last_report_in_redis(scene):
    scene.reports.stored["general"], scene.reports.is_down = Training(steps=9), True
    scene.learner.distiller.steps = 3
    scene.report()
    scene.reports.is_down = False
    assert scene.report().steps == 9


def test_report_is_written_once_a_second_with_a_learner(scene):
    scene.reporter.report(None, None, lambda learner: 0.0)
    assert not scene.reports.writes
    for _ in range(8):
        scene.clock.now += 0.25
        scene.reporter.report(scene.learner, None, lambda learner: 0.0)
    assert scene.reports.writes == 2


def test_replaced_trainer_reports_nothing(clock):
    scene = Scene(clock, held=taken_over)
    with pytest.raises(FencedError):
        scene.report()
    assert not scene.reports.writes


@pytest.mark.parametrize(("decision", "ahead", "least"), [(None, 32, 0.1), (BEGINS, 32, 0.1), (WAITS, 8, 0.05)])
def test_states_wanted_falls_as_training_falls_behind(scene, decision, ahead, least):
    shares = []
    for number in (ahead, 2 * ahead, 2000):
        for name in range(number):
            scene.learner.add(make_trace(f"r{name}", seed=name % 7))
        shares.append(scene.report(decision=decision).states_wanted)
        assert shares[-1] == pytest.approx(max(least, min(1.0, 2 - scene.learner.replay.fresh_records / ahead)))
    assert shares[0] == 1.0
    assert least < shares[1] < 1.0
    assert shares[2] == least


def test_one_micro_step_per_second_becomes_an_event(scene):
    scene.learner.distiller.steps, scene.reporter.state.lag = 4, 2
    scene.learner.trigger.on_records(10)
    for _ in range(8):
        scene.clock.now += 0.5
        scene.record_step()
    assert len(scene.events) == 3
    figures = {"loss": 0.5, "step": 4, "tokens": 0, "records": 0, "lag": 2, "skipped": 0, "cpu_seconds": 0.0}
    assert scene.events[-1] == ("train_step", {**figures, "budget": 80})
    scene.learner.distiller.head_loss = 0.25
    scene.clock.now += 2
    scene.record_step()
    assert scene.events[-1][1]["head_loss"] == 0.25


def test_loss_ignores_skipped_steps(scene):
    scene.record_step(0.5)
    scene.record_step(9.0, skipped=True)
    assert scene.reporter.state.loss == 0.5


def test_publication_clears_the_trained_requests(scene):
    scene.record_step(name="first")
    assert scene.reporter.trained_requests.contains("first")
    scene.reporter.record_publication(1)
    assert not scene.reporter.trained_requests.contains("first")
    assert (scene.reporter.state.published, scene.reporter.state.version) == (1, 1)


def test_resume_restores_the_state_or_changes_nothing(scene):
    scene.reporter.state.published, scene.reporter.state.drifts, scene.learner.counters.records = 2, 3, 9
    scene.record_step(name="first")
    scene.reporter.cost.charge(lost=4.0)
    scene.reporter.fund.follow(1)
    scene.reporter.fund.learn(3.0, 1.0)
    saved = scene.reporter.checkpoint_state(scene.learner)
    successor = scene.successor()
    for broken in (
        {**saved, "counters": {"records": 1}},
        {**saved, "spent": 3},
        {**saved, "learnt": None},
        {**saved, "fund": 3},
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            successor.resume(broken)
    assert successor.checkpoint_state(scene.learner) == {**scene.successor().checkpoint_state(scene.learner)}
    successor.resume(saved)
    assert successor.checkpoint_state(scene.learner) == saved
    assert (successor.state.published, successor.state.drifts, successor.state.records) == (2, 3, 9)


def test_report_has_version_effects_and_payback_time(scene):
    fund = scene.reporter.fund
    fund.follow(1)
    fund.follow(2, 0.1)
    assert scene.report().account.effects == (VersionEffect(2, 1),)
    plain = 100 * math.exp(0.1)
    fund.measure({2: Measured(50, 100.0, plain, (0.001 * plain) ** 2)})
    scene.reporter.cost.charge(lost=2.0)
    account = scene.report().account
    assert (account.log, account.paid_back) == (pytest.approx(0.1), None)
    assert account.effects[0].is_decided
    fund.serve(1000.0)
    account = scene.report().account
    assert account.certain > 2
    assert account.certain < account.saved
    assert account.paid_back == pytest.approx(time.time(), abs=60)
    assert scene.report().account.paid_back == account.paid_back
    scene.reporter.cost.charge(lost=1e6)
    assert scene.report().account.paid_back is None


def test_report_on_a_mixed_drafter_has_its_gain_over_recall_alone(scene):
    """A version has no effect of its own, and a successor reports the last effect until replicas report."""
    reporter = scene.successor(mixes=True)
    reporter.fund.follow(1)
    reporter.fund.follow(2, 0.1)
    assert scene.report(reporter).account == FundReport(worth=0.25)
    plain = 100 * math.exp(0.1)
    reporter.fund.measure_mixed(Measured(50, 100.0, plain, (0.001 * plain) ** 2))
    saved = reporter.checkpoint_state(scene.learner)
    for mixes in (True, False):
        successor = scene.successor(mixes)
        successor.resume(saved)
        account = scene.report(successor).account
        if mixes:
            assert (account.effects, account.log) == ((), pytest.approx(0.1))
            assert (account.over_recall.before, account.over_recall.log) == (RECALL_ALONE, account.log)
        else:
            assert (account.effects, account.log, account.over_recall) == ((VersionEffect(2, 1),), None, None)


def test_decision_becomes_an_event_with_the_fund(scene):
    scene.reporter.fund.learn(3.0, 1.0)
    scene.reporter.cost.charge(lost=3.0)
    scene.reporter.record_decision(WAITS)
    figures = {"begins": False, "fund": 1.2, "needed": 5.0, "certain": 0.0, "saved": 0.0, "cost": 3.0, "fruitless": 0}
    assert scene.events == [("fund", figures)]


def test_checkpoint_without_a_fund_starts_a_new_fund(scene, caplog):
    saved = scene.reporter.checkpoint_state(scene.learner)
    del saved["fund"]
    saved["spent"] = {"by_version": {"2": 5.0}, "unpublished": 1.0, "older": 0.0, "slowed": 0.5, "saving": {}}
    successor = scene.successor()
    successor.resume(saved)
    assert successor.fund.spent == 0
    assert "a new fund starts with the cost of one version" in caplog.text
