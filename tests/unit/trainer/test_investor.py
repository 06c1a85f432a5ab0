"""Account of training: reports of replicas, the current price, decisions and random pauses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import Settings
from osd.economy.report import Measured
from osd.economy.training import Fund
from osd.registry.replica_loads import DomainWork, ReplicaLoad
from trainer import investor
from trainer.investor import PAUSED_SHARE, SLOT_SECONDS, Investor, SlowdownMeter, is_pause

FASTER = Measured(100, 100.0, 120.0, 1.0)


class Scene:
    """Investor with a fake clock and replicas with two threads, whose reports the test sets."""

    def __init__(self, monkeypatch, requests_run=True, **trainer):
        self.now = self.trained = 0.0
        self.work_reported, self.decisions, self.charged = {"r1": {"general": DomainWork(0.0)}}, [], []
        monkeypatch.setattr(investor.time, "monotonic", lambda: self.now)
        settings = Settings(trainer=trainer, engine={"threads": 2})
        self.learner = SimpleNamespace(log_gain=None, next_candidate=100)
        self.capacity, self.fund = SimpleNamespace(requests_run=requests_run), Fund()
        self.cost = SimpleNamespace(charge=lambda **seconds: self.charged.append(seconds))
        self.record_decision = self.decisions.append
        self.investor = Investor(settings, self, self.capacity, self, lambda: self.trained)
        self.fund.follow(1)

    def work(self):
        if self.work_reported is None:
            raise RedisConnectionError("gone")
        return self.work_reported

    def busy(self, seconds, name="r1", **fields):
        self.work_reported = {**self.work_reported, name: {"general": DomainWork(seconds, **fields)}}
        self.look()

    def look(self):
        self.now += 1.1
        self.investor.read_work()

    def train(self, seconds):
        self.trained += seconds
        self.investor.observe_loads({})

    def observe(self, loads, trained, now):
        self.trained, self.now = trained, now
        self.investor.observe_loads(dict(enumerate(loads)))
        return 0.0

    def begins(self):
        self.now += 1.1
        decision = self.investor.next_slice(self.learner)
        return decision is None or decision.begins


def test_training_is_free_before_replicas_report_work(monkeypatch):
    scene = Scene(monkeypatch)
    scene.work_reported = {}
    scene.fund.learn(1e6, 1.0)
    assert scene.begins()
    assert scene.investor.decision is None


def test_fund_pays_only_while_requests_run(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.begins()
    scene.train(20.0)
    scene.fund.end_slice()
    scene.learner.next_candidate = 200
    assert not scene.begins()
    scene.capacity.requests_run = False
    assert scene.begins()
    scene.train(1000.0)
    assert scene.fund.spent == 20
    assert [decision.begins for decision in scene.decisions] == [True, False, True]
    priced = Scene(monkeypatch, requests_run=False, price_idle=0.5)
    priced.train(100.0)
    assert priced.fund.spent == 50
    assert not priced.begins()


def test_free_training_stops_when_requests_lose_too_much(monkeypatch):
    def begins_after(slower, price=1.0):
        scene = Scene(monkeypatch, requests_run=False, price=price)
        assert scene.begins()
        _, lost = run_slots(scene.observe, slower)
        assert scene.fund.lost == pytest.approx(2 * price * lost, rel=0.25, abs=5.0)
        return scene.begins()

    assert begins_after(1.0)
    assert not begins_after(1.05)
    assert begins_after(1.05, price=0.0)


def test_covered_slice_continues_until_its_candidate(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.begins()
    scene.train(50.0)
    assert scene.begins()
    scene.learner.next_candidate = 200
    assert not scene.begins()


def test_busy_seconds_and_savings_fill_the_fund(monkeypatch):
    scene = Scene(monkeypatch)
    scene.look()
    scene.busy(100.0)
    scene.fund.follow(2, 0.1)
    scene.busy(150.0)
    scene.fund.measure({2: FASTER})
    assert scene.fund.busy == pytest.approx(300.0)
    (version,) = scene.fund.versions
    assert (version.busy, version.log) == (pytest.approx(100.0), pytest.approx(math.log(1.2)))
    assert scene.fund.certain > 0


def test_restarted_replica_adds_only_its_new_seconds(monkeypatch):
    scene = Scene(monkeypatch)
    scene.look()
    scene.busy(100.0)
    scene.busy(5000.0, "r2")
    assert scene.fund.busy == pytest.approx(200.0)
    scene.busy(3.0)
    assert scene.fund.busy == pytest.approx(206.0)
    scene.work_reported = None
    scene.look()
    assert scene.fund.busy == pytest.approx(206.0)


def test_forecast_grows_with_promised_gain_and_work(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.investor.worth(scene.learner) == math.inf
    scene.learner.log_gain = 0.1
    scene.look()
    for _ in range(50):
        scene.busy(scene.work_reported["r1"]["general"].busy + 0.55)
    some = scene.investor.worth(scene.learner)
    scene.learner.log_gain = 0.2
    assert scene.investor.worth(scene.learner) == pytest.approx(2 * some)
    assert some > 0


def test_swap_costs_the_uptake_of_all_replicas(monkeypatch):
    scene = Scene(monkeypatch)
    scene.busy(1.0, uptake=0.5)
    scene.busy(1.0, "r2", uptake=0.25)
    scene.investor.charge_swap()
    assert scene.fund.spent == 0.75
    assert scene.charged[-1] == {"lost": 0.75}


def test_decisions_are_reported_on_change_or_each_minute(monkeypatch):
    scene = Scene(monkeypatch)
    for _ in range(50):
        scene.begins()
    assert len(scene.decisions) == 1
    for _ in range(10):
        scene.begins()
    assert len(scene.decisions) == 2


def test_stream_interval_grows_while_the_fund_is_short(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.investor.stream_interval(awaited=False) == 1
    scene.train(50.0)
    assert not scene.begins()
    assert (scene.investor.stream_interval(awaited=False), scene.investor.stream_interval(awaited=True)) == (3, 1)


def test_pauses_are_random_slots_of_the_set_share():
    slots = [is_pause(SLOT_SECONDS * slot) for slot in range(5000)]
    assert sum(slots) / 5000 == pytest.approx(PAUSED_SHARE, abs=0.02)
    assert all(is_pause(SLOT_SECONDS * (slot + 0.9)) == rests for slot, rests in enumerate(slots))


def run_slots(observe, slower, slots=800, restarts=lambda slot: False):
    """Call ``observe`` in each of ``slots`` slots; return the sum of its results, and the seconds really lost."""
    rng = np.random.default_rng(1)
    steps = rows = 0
    seconds = trained = lost = estimated = 0.0
    for slot in range(slots):
        now = SLOT_SECONDS * slot + 0.01
        estimated += observe([ReplicaLoad(1, 0, 1, 1.0, 1.0, steps, rows, seconds)], trained, now)
        if restarts(slot):
            steps = rows = 0
            seconds = 0.0
        added = int(rng.integers(50, 150))
        took = added * float(rng.uniform(0.0098, 0.0102))
        rests = is_pause(now)
        steps, rows, seconds = steps + added, rows + 3 * added, seconds + took * (1.0 if rests else slower)
        trained += 0.0 if rests else 0.4
        lost += 0.0 if rests else took * (slower - 1)
    return estimated, lost


def run_meter(slower, **slots):
    """Return a meter after many slots, the lost seconds by its estimate, and those really lost."""
    meter = SlowdownMeter()
    return meter, *run_slots(meter.observe, slower, **slots)


def test_slowdown_meter_estimates_the_lost_seconds():
    meter, estimated, lost = run_meter(1.05)
    assert meter.share == pytest.approx(1 - 1 / 1.05, abs=0.01)
    assert estimated == pytest.approx(lost, rel=0.25)
    assert run_meter(1.0)[0].share < 0.01


def test_slowdown_meter_skips_replica_restarts():
    meter, _, _ = run_meter(1.05, restarts=lambda slot: slot % 10 == 0)
    assert meter.share == pytest.approx(1 - 1 / 1.05, abs=0.015)


def test_slowdown_meter_stays_at_zero_without_training():
    meter = SlowdownMeter()
    for slot in range(200):
        load = ReplicaLoad(1, 0, 1, 1.0, 1.0, 100 * slot, 300 * slot, 1.0 * slot)
        assert meter.observe([load], 0.0, SLOT_SECONDS * slot) == 0
    assert meter.share == 0
