from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import TrainerSettings
from osd.economy.report import Measured
from osd.economy.training import Decision
from osd.learning.distiller import Distiller, Step
from osd.learning.gate import Gate
from osd.learning.online import Learned, Learner, empty_replay
from osd.registry.pointer_file import FencedError
from osd.registry.training import Account, Training, VersionEffect
from tests.clocks import Clock
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace
from trainer.reporter import CostMeter, TrainingReporter
from trainer.state import Spent

BEGINS, WAITS = Decision(True, 12.0, 5.0), Decision(False, 1.2, 5.0)


class Book:
    """Stands in for the reports in Redis."""

    def __init__(self, kept=None):
        self.kept, self.gone, self.writes = kept, False, 0

    def get(self, domain):
        if self.gone:
            raise RedisConnectionError("gone")
        return self.kept

    def set(self, domain, value):
        if self.gone:
            raise RedisConnectionError("gone")
        self.kept = {domain: value}
        self.writes += 1


@pytest.fixture
def clock():
    return Clock()


def test_version_costs_all_seconds_since_the_one_before(clock):
    meter = CostMeter(clock)
    clock.now += 5
    meter.charge(beside=2.0, lost=1.0)
    assert meter.spent() == Spent(cpu=5.0, beside=2.0, slowed=1.0, unpublished=6.0)
    meter.published()
    clock.now += 3
    assert meter.spent() == Spent(cpu=8.0, beside=2.0, slowed=1.0, unpublished=3.0)
    assert meter.spent().total == 9.0


@pytest.mark.parametrize(
    ("reported", "before"),
    [
        (Training(), Spent(6.0, 3.0, 1.0, 2.0)),
        (Training(cpu_seconds=8.0, beside_seconds=4.0, slowed_seconds=2.0), Spent(8.0, 4.0, 2.0, 5.0)),
    ],
)
def test_successor_goes_on_from_the_checkpoint_or_the_report_whichever_is_more(clock, reported, before):
    meter = CostMeter(clock)
    clock.now += 2
    meter.charge(lost=1.0)
    meter.resume(Spent(6.0, 3.0, 1.0, 2.0), reported)
    assert meter.spent() == Spent(before.cpu + 2, before.beside, before.slowed + 1, before.unpublished + 3)


def test_cost_is_the_cpu_time_of_all_threads_and_not_the_wall():
    meter, began = CostMeter(), time.monotonic()
    time.sleep(0.2)
    assert meter.spent().total < 0.5 * (time.monotonic() - began)
    deadline = time.process_time() + 0.15

    def burn():
        while time.process_time() < deadline:
            pass

    other = threading.Thread(target=burn)
    other.start()
    other.join()
    assert meter.spent().total >= 0.15


@contextmanager
def taken_over():
    raise FencedError("another trainer has taken over")
    yield


class Scene:
    """A reporter of one domain, its learner, and what it told."""

    def __init__(self, clock, reports=None, held=nullcontext):
        settings = TrainerSettings(min_records=1)
        self.clock, self.reports, self.events = clock, reports or Book({}), []
        self.learner = Learner(
            Distiller(Toy(), settings), settings, Gate(3, "forward_kl"), VOCABULARY, empty_replay(settings)
        )
        self.service = SimpleNamespace(
            domain="general",
            lease=SimpleNamespace(held=held),
            tell=lambda kind, version, **figures: self.events.append((kind, figures)),
        )
        self.it = self.successor()

    def successor(self):
        return TrainingReporter(self.service, CostMeter(lambda: 7.0), self.reports, clock=self.clock)

    def report(self, it=None, decision=None):
        self.clock.now += 1
        (it or self.it).report(self.learner, decision, lambda learner: 0.25)
        return self.reports.kept.get("general")

    def learned(self, loss=0.5, skipped=False, name="r"):
        self.it.learned(self.learner, Learned(Step(loss, skipped), 30, [(name, 0)]))


@pytest.fixture
def scene(clock):
    return Scene(clock)


def test_a_report_has_counts_costs_replay_and_expectations(scene):
    state = scene.it.state
    scene.learner.distiller.steps, scene.learner.distiller.skipped, scene.learner.counters.tokens = 5, 3, 600
    state.published, state.rejected, state.refused, state.drifts, state.loss = 1, 2, 4, 6, 0.5
    state.lag, state.lag_seconds = 7, 8.0
    traces = [make_trace(f"r{number}", seed=number) for number in range(3)]
    held = sum(scene.learner.add(trace).part == "held_out" for trace in traces)
    scene.it.cost.charge(beside=1.0, lost=2.0)
    told = scene.report(decision=BEGINS)
    assert told == Training(
        steps=5, skipped=3, positions=600, records=3, held_out=held, refused=4, passed=1, rejected=2, drifts=6,
        beside_seconds=1.0, slowed_seconds=2.0,
        replay_records=3, replay_tokens=36, replay_bytes=sum(trace.nbytes for trace in traces),
        lag=7, lag_seconds=8.0, loss=0.5,
        account=Account(begins=True, fund=12.0, needed=5.0, worth=0.25), states_wanted=1.0,
    )  # fmt: skip
    status = scene.it.status(scene.learner)
    assert (status["steps"], status["tokens"], status["records"], status["published"]) == (5, 600, 3, 1)


def test_no_reported_count_falls_after_an_older_checkpoint_or_a_loss_of_redis(scene):
    distiller, state = scene.learner.distiller, scene.it.state
    distiller.steps, state.rejected = 50, 4
    scene.report()
    distiller.steps = 30
    successor = scene.successor()
    successor.state.rejected = 5
    told = scene.report(successor)
    assert (told.steps, told.rejected) == (50, 5)
    scene.reports.kept.clear()
    distiller.steps = 40
    assert scene.report(successor).steps == 50
    distiller.steps = 60
    assert scene.report(successor).steps == 60


def test_a_report_waits_for_redis_and_for_what_was_reported_before(scene):
    scene.reports.kept["general"], scene.reports.gone = Training(steps=9), True
    scene.learner.distiller.steps = 3
    scene.report()
    scene.reports.gone = False
    assert scene.report().steps == 9


def test_reports_come_once_a_second_and_not_before_there_is_a_learner(scene):
    scene.it.report(None, None, lambda learner: 0.0)
    assert not scene.reports.writes
    for _ in range(8):
        scene.clock.now += 0.25
        scene.it.report(scene.learner, None, lambda learner: 0.0)
    assert scene.reports.writes == 2


def test_a_trainer_that_lost_its_domain_reports_nothing(clock):
    scene = Scene(clock, held=taken_over)
    with pytest.raises(FencedError):
        scene.report()
    assert not scene.reports.writes


@pytest.mark.parametrize(("decision", "ahead", "least"), [(None, 32, 0.1), (BEGINS, 32, 0.1), (WAITS, 8, 0.05)])
def test_hidden_states_are_wanted_of_as_many_records_as_training_keeps_up_with(scene, decision, ahead, least):
    wanted = []
    for number in (ahead, 2 * ahead, 2000):
        for name in range(number):
            scene.learner.add(make_trace(f"r{name}", seed=name % 7))
        wanted.append(scene.report(decision=decision).states_wanted)
        assert wanted[-1] == pytest.approx(max(least, min(1.0, 2 - scene.learner.replay.fresh_records / ahead)))
    assert wanted[0] == 1.0
    assert least < wanted[1] < 1.0
    assert wanted[2] == least


def test_one_micro_step_a_second_becomes_an_event_with_its_figures(scene):
    scene.learner.distiller.steps, scene.it.state.lag = 4, 2
    scene.learner.trigger.arrived(10)
    for _ in range(8):
        scene.clock.now += 0.5
        scene.learned()
    assert len(scene.events) == 3
    figures = {"loss": 0.5, "step": 4, "tokens": 0, "records": 0, "lag": 2, "skipped": 0, "cpu_seconds": 0.0}
    assert scene.events[-1] == ("train_step", {**figures, "budget": 80})
    scene.learner.distiller.head_loss = 0.25
    scene.clock.now += 2
    scene.learned()
    assert scene.events[-1][1]["head_loss"] == 0.25


def test_the_loss_is_that_of_the_last_step_that_taught_something(scene):
    scene.learned(0.5)
    scene.learned(9.0, skipped=True)
    assert scene.it.state.loss == 0.5


def test_a_version_names_the_requests_that_were_learnt_since_the_one_before(scene):
    scene.learned(name="first")
    assert scene.it.learnt.knows("first")
    scene.it.published(1)
    assert not scene.it.learnt.knows("first")
    assert (scene.it.state.published, scene.it.state.version) == (1, 1)


def test_what_was_saved_is_resumed_and_what_cannot_be_read_changes_nothing(scene):
    scene.it.state.published, scene.it.state.drifts, scene.learner.counters.records = 2, 3, 9
    scene.learned(name="first")
    scene.it.cost.charge(lost=4.0)
    scene.it.fund.follow(1)
    scene.it.fund.learn(3.0, 1.0)
    saved = scene.it.saved(scene.learner)
    other = scene.successor()
    for broken in (
        {**saved, "counters": {"records": 1}},
        {**saved, "spent": 3},
        {**saved, "learnt": None},
        {**saved, "fund": 3},
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            other.resume(broken)
    assert other.saved(scene.learner) == {**scene.successor().saved(scene.learner)}
    other.resume(saved)
    assert other.saved(scene.learner) == saved
    assert (other.state.published, other.state.drifts, other.state.records) == (2, 3, 9)


def measured(scene, log):
    plain = 100 * math.exp(log)
    scene.it.fund.measure({2: Measured(50, 100.0, plain, (0.001 * plain) ** 2)})


def test_report_says_what_versions_brought_and_when_they_paid_back(scene):
    fund = scene.it.fund
    fund.follow(1)
    fund.follow(2, 0.1)
    assert scene.report().account.effects == (VersionEffect(2, 1),)
    measured(scene, 0.1)
    scene.it.cost.charge(lost=2.0)
    account = scene.report().account
    assert (account.log, account.paid_back) == (pytest.approx(0.1), None)
    assert account.effects[0].is_decided
    fund.serve(1000.0)
    account = scene.report().account
    assert account.certain > 2
    assert account.certain < account.saved
    assert account.paid_back == pytest.approx(time.time(), abs=60)
    assert scene.report().account.paid_back == account.paid_back
    scene.it.cost.charge(lost=1e6)
    assert scene.report().account.paid_back is None


def test_decision_becomes_an_event_with_the_state_of_the_fund(scene):
    scene.it.fund.learn(3.0, 1.0)
    scene.it.cost.charge(lost=3.0)
    scene.it.decided(WAITS)
    figures = {"begins": False, "fund": 1.2, "needed": 5.0, "certain": 0.0, "saved": 0.0, "cost": 3.0, "fruitless": 0}
    assert scene.events == [("fund", figures)]


def test_checkpoint_without_a_fund_is_read_and_the_fund_begins(scene, caplog):
    saved = scene.it.saved(scene.learner)
    del saved["fund"]
    saved["spent"] = {"by_version": {"2": 5.0}, "unpublished": 1.0, "older": 0.0, "slowed": 0.5, "saving": {}}
    other = scene.successor()
    other.resume(saved)
    assert other.fund.spent == 0
    assert "it begins with the cost of one version" in caplog.text
