"""The account of training: reports of replicas, the price of the moment, decisions, and random pauses."""

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
from trainer.investor import PAUSED_SHARE, SLOT_SECONDS, Investor, Slowing, paused

FASTER = Measured(100, 100.0, 120.0, 1.0)


class Scene:
    """An investor on a clock of its own, beside two-core replicas that report what a test says."""

    def __init__(self, monkeypatch, beside=True, **trainer):
        self.now = self.trained = 0.0
        self.work_reported, self.told, self.charged = {"r1": {"general": DomainWork(0.0)}}, [], []
        monkeypatch.setattr(investor.time, "monotonic", lambda: self.now)
        settings = Settings(trainer=trainer, engine={"threads": 2})  # type: ignore[arg-type]
        self.learner = SimpleNamespace(promised=None, next_candidate=100)
        self.capacity, self.fund = SimpleNamespace(beside_requests=beside), Fund()
        self.cost = SimpleNamespace(charge=lambda **seconds: self.charged.append(seconds))
        self.decided = self.told.append
        self.it = Investor(settings, self, self.capacity, self, lambda: self.trained)  # type: ignore[arg-type]
        self.fund.follow(1)

    def work(self):
        if self.work_reported is None:
            raise RedisConnectionError("gone")
        return self.work_reported

    def busy(self, seconds, name="r1", **more):
        self.work_reported = {**self.work_reported, name: {"general": DomainWork(seconds, **more)}}
        self.look()

    def look(self):
        self.now += 1.1
        self.it.look()

    def train(self, seconds):
        self.trained += seconds
        self.it.seen({})

    def begins(self):
        self.now += 1.1
        decision = self.it.next_slice(self.learner)
        return decision is None or decision.begins


def test_training_begins_freely_before_replicas_report_their_work(monkeypatch):
    scene = Scene(monkeypatch)
    scene.work_reported = {}
    scene.fund.learn(1e6, 1.0)
    assert scene.begins()
    assert scene.it.decided is None


def test_fund_pays_beside_requests_and_idle_moments_are_free(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.begins()
    scene.train(20.0)
    scene.fund.end_slice()
    scene.learner.next_candidate = 200
    assert not scene.begins()
    scene.capacity.beside_requests = False
    assert scene.begins()
    scene.train(1000.0)
    assert scene.fund.spent == 20
    assert [decision.begins for decision in scene.told] == [True, False, True]
    priced = Scene(monkeypatch, beside=False, price_idle=0.5)
    priced.train(100.0)
    assert priced.fund.spent == 50
    assert not priced.begins()


def test_slice_that_the_fund_covered_goes_on_until_its_candidate(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.begins()
    scene.train(50.0)
    assert scene.begins()
    scene.learner.next_candidate = 200
    assert not scene.begins()


def test_busy_seconds_of_all_cores_and_certain_savings_fill_the_fund(monkeypatch):
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


def test_restarted_or_new_replica_moves_the_fund_by_differences_alone(monkeypatch):
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


def test_forecast_grows_with_the_promise_and_the_work_of_the_domain(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.it.worth(scene.learner) == math.inf
    scene.learner.promised = 0.1
    scene.look()
    for _ in range(50):
        scene.busy(scene.work_reported["r1"]["general"].busy + 0.55)
    some = scene.it.worth(scene.learner)
    scene.learner.promised = 0.2
    assert scene.it.worth(scene.learner) == pytest.approx(2 * some)
    assert some > 0


def test_versions_cost_what_replicas_need_to_take_them_up(monkeypatch):
    scene = Scene(monkeypatch)
    scene.busy(1.0, uptake=0.5)
    scene.busy(1.0, "r2", uptake=0.25)
    scene.it.taken_up()
    assert scene.fund.spent == 0.75
    assert scene.charged[-1] == {"lost": 0.75}


def test_decisions_are_told_when_they_change_and_once_a_minute(monkeypatch):
    scene = Scene(monkeypatch)
    for _ in range(50):
        scene.begins()
    assert len(scene.told) == 1
    for _ in range(10):
        scene.begins()
    assert len(scene.told) == 2


def test_stream_is_looked_at_more_rarely_while_the_fund_covers_nothing(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.it.patience(awaited=False) == 1
    scene.train(50.0)
    assert not scene.begins()
    assert (scene.it.patience(awaited=False), scene.it.patience(awaited=True)) == (3, 1)


def test_pauses_are_random_slots_of_the_asked_share():
    slots = [paused(SLOT_SECONDS * slot) for slot in range(5000)]
    assert sum(slots) / 5000 == pytest.approx(PAUSED_SHARE, abs=0.02)
    assert all(paused(SLOT_SECONDS * (slot + 0.9)) == rests for slot, rests in enumerate(slots))


def observed(slower, slots=800, gone=lambda slot: False):
    """A slowing that has seen so many slots, the seconds lost by it, and those really lost."""
    it, rng = Slowing(), np.random.default_rng(1)
    steps = rows = 0
    seconds = trained = lost = found = 0.0
    for slot in range(slots):
        now = SLOT_SECONDS * slot + 0.01
        found += it.observe([ReplicaLoad(1, 0, 1, 1.0, 1.0, steps, rows, seconds)], trained, now)
        if gone(slot):
            steps = rows = 0
            seconds = 0.0
        added = int(rng.integers(50, 150))
        took = added * float(rng.uniform(0.0098, 0.0102))
        rests = paused(now)
        steps, rows, seconds = steps + added, rows + 3 * added, seconds + took * (1.0 if rests else slower)
        trained += 0.0 if rests else 0.4
        lost += 0.0 if rests else took * (slower - 1)
    return it, found, lost


def test_slowing_finds_the_seconds_that_requests_lose():
    it, found, lost = observed(1.05)
    assert it.share == pytest.approx(1 - 1 / 1.05, abs=0.01)
    assert found == pytest.approx(lost, rel=0.25)
    assert observed(1.0)[0].share < 0.01


def test_slowing_leaves_out_slots_in_which_a_replica_restarts():
    it, _, _ = observed(1.05, gone=lambda slot: slot % 10 == 0)
    assert it.share == pytest.approx(1 - 1 / 1.05, abs=0.015)


def test_slowing_says_nothing_without_training():
    it = Slowing()
    for slot in range(200):
        load = ReplicaLoad(1, 0, 1, 1.0, 1.0, 100 * slot, 300 * slot, 1.0 * slot)
        assert it.observe([load], 0.0, SLOT_SECONDS * slot) == 0
    assert it.share == 0
