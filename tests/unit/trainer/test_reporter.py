from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import TrainerSettings
from osd.learning.distiller import Distiller, Step
from osd.learning.gate import Gate
from osd.learning.online import Learned, Learner, empty_replay
from osd.learning.value import Investment
from osd.registry.ledger import Spent
from osd.registry.pointer_file import FencedError
from osd.registry.training import Expected, Training
from tests.clocks import Clock
from tests.unit.learning.toys import VOCABULARY, Toy, make_trace
from trainer.reporter import CostMeter, TrainingReporter

PAYS = Investment(True, 30.0, 0.1, 0.02, 600.0, 1.0, 12.0, 5.0)
COSTS = Investment(False, 30.0, 0.1, 0.002, 600.0, 1.0, 1.2, 5.0)


class Book:
    """Stands in for the ledger, or the reports, in Redis."""

    def __init__(self, kept=None):
        self.kept, self.gone, self.writes = kept, False, 0

    def get(self, domain):
        if self.gone:
            raise RedisConnectionError("gone")
        return self.kept

    def set(self, domain, value):
        if self.gone:
            raise RedisConnectionError("gone")
        self.kept = {domain: value} if isinstance(value, Training) else value
        self.writes += 1


@pytest.fixture
def clock():
    return Clock()


def test_each_version_is_charged_with_what_was_spent_since_the_one_before(clock):
    book = Book()
    meter = CostMeter("general", book, clock)
    clock.now += 5
    meter.published(2, 0.0)
    clock.now += 3
    meter.published(3, 0.0)
    clock.now += 1
    assert meter.spent() == Spent({2: 5.0, 3: 3.0}, 1.0, saving={2: 0.0, 3: 0.0})
    assert meter.spent().total == 9.0
    assert book.kept == Spent({2: 5.0, 3: 3.0}, 0.0, saving={2: 0.0, 3: 0.0})


@pytest.mark.parametrize("told", [Spent({2: 5.0, 3: 4.0}, 0.5), Spent({}, 0.1)])
def test_a_successor_goes_on_from_the_checkpoint_or_the_ledger_whichever_is_more(clock, told):
    saved = Spent({2: 5.0}, 1.0, slowed=3.0)
    meter = CostMeter("general", Book(told), clock)
    clock.now += 2
    meter.charge(1.0)
    meter.resume(saved)
    before = max(saved, told, key=lambda spent: spent.total)
    assert meter.spent() == Spent(before.by_version, before.unpublished + 3, slowed=before.slowed + 1)


def test_without_redis_no_cost_is_lost_and_the_ledger_is_written_later(clock):
    book = Book()
    book.gone = True
    meter = CostMeter("general", book, clock)
    meter.resume(Spent({2: 5.0}, 1.0))
    clock.now += 4
    meter.published(3, 0.0)
    book.gone = False
    meter.published(4, 0.0)
    assert book.kept == Spent({2: 5.0, 3: 5.0, 4: 0.0}, 0.0, saving={3: 0.0, 4: 0.0})


def test_a_cost_is_the_cpu_time_of_all_threads_and_not_the_wall():
    meter, began = CostMeter("general", Book()), time.monotonic()
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


def test_a_trainer_that_lost_its_domain_does_not_write_the_ledger(clock):
    book = Book(Spent({2: 5.0}))
    meter = CostMeter("general", book, clock, taken_over)
    with pytest.raises(FencedError):
        meter.tell()
    assert not book.writes


def test_a_lock_that_cannot_be_taken_leaves_the_ledger_for_later(clock):
    book, locks = Book(Spent()), [OSError("held by another process"), nullcontext()]

    def held():
        lock = locks.pop(0)
        if isinstance(lock, OSError):
            raise lock
        return lock

    meter = CostMeter("general", book, clock, held)
    clock.now += 3
    meter.tell()
    assert not book.writes
    meter.published(2, 0.0)
    assert book.kept == Spent({2: 3.0}, saving={2: 0.0})


def test_a_version_has_paid_back_when_it_saved_its_cost_and_what_rounds_lost(clock):
    meter = CostMeter("general", Book(), clock)
    clock.now += 40
    meter.charge(20.0)
    meter.published(2, 0.2)
    spent = meter.spent()
    assert (spent.total, spent.cpu, spent.slowed) == (60.0, 40.0, 20.0)
    assert spent.payback(2) == pytest.approx(300)
    clock.now += 60
    meter.published(3, 0.1)
    clock.now += 30
    spent = meter.spent()
    assert spent.payback(3) == pytest.approx(600)
    assert spent.payback_of_all == pytest.approx(150 / 0.3)
    meter.keep([3])
    assert meter.spent().payback_of_all == spent.payback_of_all
    assert meter.spent().payback(2) is None
    meter.published(4, -0.5)
    assert meter.spent().paybacks(4) == {"core_seconds": 30.0, "payback_seconds": None, "payback_of_all": None}


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
        return TrainingReporter(
            self.service, CostMeter("general", Book(Spent()), lambda: 7.0), self.reports, clock=self.clock
        )

    def report(self, it=None, investment=None):
        self.clock.now += 1
        (it or self.it).report(self.learner, investment)
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
    scene.it.cost.charge(2.0)
    told = scene.report(investment=PAYS)
    assert told == Training(
        steps=5, skipped=3, positions=600, records=3, held_out=held, refused=4, passed=1, rejected=2, drifts=6,
        slowed_seconds=2.0, replay_records=3, replay_tokens=36, replay_bytes=sum(trace.nbytes for trace in traces),
        lag=7, lag_seconds=8.0, loss=0.5,
        expected=Expected(pays=True, saving_rate=0.02, horizon=600.0, earns=12.0, costs=5.0), states_wanted=1.0,
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
    scene.it.report(None, None)
    assert not scene.reports.writes
    for _ in range(8):
        scene.clock.now += 0.25
        scene.it.report(scene.learner, None)
    assert scene.reports.writes == 2


def test_a_trainer_that_lost_its_domain_reports_nothing(clock):
    scene = Scene(clock, held=taken_over)
    with pytest.raises(FencedError):
        scene.report()
    assert not scene.reports.writes


@pytest.mark.parametrize(("investment", "ahead", "least"), [(None, 32, 0.1), (PAYS, 32, 0.1), (COSTS, 8, 0.05)])
def test_hidden_states_are_wanted_of_as_many_records_as_training_keeps_up_with(scene, investment, ahead, least):
    wanted = []
    for number in (ahead, 2 * ahead, 2000):
        for name in range(number):
            scene.learner.add(make_trace(f"r{name}", seed=name % 7))
        wanted.append(scene.report(investment=investment).states_wanted)
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
    scene.it.published(2, 1, 0.0)
    assert not scene.it.learnt.knows("first")
    assert (scene.it.state.published, scene.it.state.version) == (1, 1)


def test_what_was_saved_is_resumed_and_what_cannot_be_read_changes_nothing(scene):
    scene.it.state.published, scene.it.state.drifts, scene.learner.counters.records = 2, 3, 9
    scene.learned(name="first")
    scene.it.cost.charge(4.0)
    saved = scene.it.saved(scene.learner)
    other = scene.successor()
    for broken in ({**saved, "counters": {"records": 1}}, {**saved, "spent": 3}, {**saved, "learnt": None}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            other.resume(broken)
    assert other.saved(scene.learner) == {**scene.successor().saved(scene.learner)}
    other.resume(saved)
    assert other.saved(scene.learner) == saved
    assert (other.state.published, other.state.drifts, other.state.records) == (2, 3, 9)
