"""The shell around the learner's value: what replicas report, the price of the moment, and who is told."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import Settings
from osd.demand import WINDOW_SECONDS, Demand, Workload
from osd.learning.value import LearningCurve, Value
from osd.registry.replica_loads import ReplicaLoad
from tests.unit.learning.test_value import decision, workload
from trainer import investor
from trainer.investor import Investor, Slowing, TypicalRounds

WORTHLESS = {"r1": {"general": workload(0.9, (1.0, 3.0, 5.0, 7.0), 8)}}
DEAR = {"r1": {"general": workload(0.5, (1.0, 1.1, 1.2, 1.3))}}


class Scene:
    def __init__(self, monkeypatch, said, beside=True, **trainer):
        self.now, self.said, self.told, self.reads = 0.0, said, [], 0
        monkeypatch.setattr(investor.time, "monotonic", lambda: self.now)
        settings = Settings(trainer=trainer, engine={"threads": 2})  # type: ignore[arg-type]
        self.learner = SimpleNamespace(value=Value(3, 1000), next_candidate=100)
        self.learner.value.curve = LearningCurve(gain=2.0, seconds=100)
        self.learner.value.horizon.passed(40_000)
        self.capacity, self.slowing = SimpleNamespace(beside_requests=beside, idle=0.0), SimpleNamespace(per_second=0.0)
        self.it = Investor(settings, self, self.capacity, self.slowing, self.told.append)  # type: ignore[arg-type]

    def workloads(self):
        self.reads += 1
        if self.said is None:
            raise RedisConnectionError("gone")
        return self.said

    def pays(self, passed=0.0):
        """Whether it trains: it is worth it, or nothing is known."""
        self.now += passed
        investment = self.it.next_slice(self.learner)
        return investment is None or investment.pays


def test_it_trains_beside_requests_where_that_pays_and_freely_while_none_runs(monkeypatch):
    assert Scene(monkeypatch, DEAR).pays()
    scene = Scene(monkeypatch, WORTHLESS)
    assert not scene.pays()
    scene.capacity.beside_requests = False
    assert scene.pays()
    assert not Scene(monkeypatch, WORTHLESS, beside=False, price_idle=0.5).pays()


def test_what_its_rounds_lose_is_part_of_the_price(monkeypatch):
    scene = Scene(monkeypatch, DEAR)
    scene.slowing.per_second = 1.5
    scene.pays()
    assert scene.told[0].price == 1 + 2 * 1.5
    scene = Scene(monkeypatch, WORTHLESS, price=0)
    scene.slowing.per_second = 1.5
    assert scene.pays(), "training that is free beside requests too, as on a machine of its own"


def test_beside_requests_it_waits_for_a_moment_without_where_these_are_frequent_and_enough_cheaper(monkeypatch):
    def waits(idle, slowing=0.0, **trainer):
        scene = Scene(monkeypatch, DEAR, **trainer)
        scene.capacity.idle, scene.slowing.per_second = idle, slowing
        assert scene.pays()
        saved = 2 * scene.told[0].saving_rate
        assert scene.it.waits == bool(scene.told[0].missing)
        assert scene.it.patience(awaited=False) == (0.1 if scene.it.waits else 1.0)
        return scene.it.waits, saved

    _, saved = waits(0.0)
    assert 0.1 < saved < 0.9
    assert waits(1.1 * saved)[0], "a CPU second is free then, and costs one beside requests"
    assert not waits(0.9 * saved)[0]
    assert waits(0.3 * saved, threads=4)[0], "four times as much is trained in it"
    assert not waits(1.0, price_idle=1.0)[0], "it costs as much then"
    (_, slowed) = waits(0.0, slowing=0.5, price_idle=1.0)
    assert waits(1.1 * slowed, slowing=0.5, price_idle=1.0)[0], "but for what rounds lose"
    assert not waits(0.9 * slowed, slowing=0.5, price_idle=1.0)[0]


def test_no_moment_is_waited_for_while_something_else_is_missing(monkeypatch):
    scene = Scene(monkeypatch, DEAR)
    scene.capacity.idle = 1.0
    assert scene.pays()
    assert scene.it.waits
    scene.now += 3.0  # nobody asks: there is nothing to train on
    assert not scene.it.waits
    assert scene.it.patience(awaited=False) == 1.0


def test_where_training_does_not_pay_no_moment_is_waited_for(monkeypatch):
    scene = Scene(monkeypatch, WORTHLESS)
    scene.capacity.idle = 1.0
    assert not scene.pays()
    assert not scene.it.waits
    assert "cost more" in scene.told[0].missing
    scene.capacity.beside_requests = False
    assert scene.pays()
    assert not scene.it.waits
    assert scene.told[1].missing == ""


def test_a_request_that_comes_makes_it_wait_and_no_event(monkeypatch):
    scene = Scene(monkeypatch, DEAR, beside=False)
    scene.capacity.idle = 1.0
    for beside in (False, True, False):
        scene.capacity.beside_requests = beside
        assert scene.pays()
        assert scene.it.waits == beside
    assert len(scene.told) == 1


def test_who_has_nothing_to_train_looks_at_the_stream_the_less_often_the_less_may_come_of_it(monkeypatch):
    def patience(said, awaited=False, **trainer):
        scene = Scene(monkeypatch, said, **trainer)
        scene.pays()
        return scene.it.patience(awaited)

    assert patience(None) == patience(DEAR) == patience(WORTHLESS, awaited=True, price_idle=1) == 1.0
    assert patience(WORTHLESS) == patience(WORTHLESS, price_idle=0.5) == 3.0, "a moment without requests is cheaper"
    assert patience(WORTHLESS, price_idle=1) == 8.0


def test_until_a_replica_says_what_is_asked_of_it_training_goes_on(monkeypatch):
    for nothing in (None, {}):
        scene = Scene(monkeypatch, nothing)
        assert scene.pays()
        assert scene.told == []
    scene.said = {"r1": {"code": DEAR["r1"]["general"]}}
    assert not scene.pays(1.0), "what this domain's drafter does is known now: nothing"


def test_replicas_are_asked_once_a_second_and_the_last_answer_stays_without_redis(monkeypatch):
    scene = Scene(monkeypatch, WORTHLESS)
    for _ in range(5):
        assert not scene.pays(0.1)
    assert scene.reads == 1
    scene.said = None
    assert not scene.pays(1.0)
    assert scene.reads == 2
    assert scene.learner.value.horizon.observed > 600


def test_a_decision_is_told_with_its_numbers_when_it_changes_and_after_each_gate(monkeypatch):
    scene = Scene(monkeypatch, WORTHLESS)
    scene.pays()
    scene.pays(2.0)
    assert len(scene.told) == 1
    scene.learner.next_candidate = 200
    scene.pays(2.0)
    scene.said = DEAR
    scene.pays(2.0)
    assert [one.pays for one in scene.told] == [False, False, True]
    assert {"gain", "saving_rate", "horizon", "price", "earns", "costs"} <= scene.told[-1].figures().keys()


def test_a_manifest_says_what_a_version_is_expected_to_save_in_seconds_of_a_core(monkeypatch):
    scene = Scene(monkeypatch, DEAR)
    assert scene.it.worth(scene.learner, decision(1.5, 2.0)) is None
    scene.pays()
    scene.learner.value.length = 1.5
    found = scene.it.worth(scene.learner, decision(1.5, 2.0))
    rate = scene.learner.value.traffic([DEAR["r1"]["general"]]).saving_rate(1.5, 2.0)
    assert found.figures()["saving_rate"] == pytest.approx(2 * rate, abs=1e-6)
    assert rate > 0.05


def test_a_version_is_worth_it_that_saves_more_than_all_replicas_need_to_take_it_up(monkeypatch):
    mine = DEAR["r1"]["general"]

    def worth(uptake, beside=True, length=2.0):
        said = {name: {"general": replace(mine, uptake=uptake)} for name in ("r1", "r2")}
        scene = Scene(monkeypatch, said, beside=beside)
        scene.pays()
        scene.learner.value.length = 1.5
        return scene.it.worth(scene.learner, decision(1.5, length))

    saved = worth(0.0).saving_rate * worth(0.0).horizon
    assert worth(0.49 * saved).pays
    assert worth(0.49 * saved).uptake == pytest.approx(0.98 * saved)
    assert not worth(0.51 * saved).pays
    assert worth(0.51 * saved, beside=False).pays, "what costs nothing pays"
    assert worth(0.0, length=1.5).pays
    assert not worth(0.001, length=1.5).pays
    assert worth(0.25).figures()["uptake_seconds"] == 0.5


def test_taking_versions_up_is_part_of_what_training_costs(monkeypatch):
    costs = []
    for uptake in (0.0, 7.0):
        scene = Scene(monkeypatch, {"r1": {"general": replace(DEAR["r1"]["general"], uptake=uptake)}}, price=2.0)
        scene.pays()
        costs.append(scene.told[0].costs)
    assert costs[1] - costs[0] == pytest.approx(14.0)


def test_between_two_looks_the_decision_stays_and_a_gate_or_the_end_of_requests_makes_another(monkeypatch):
    scene, reckoned = Scene(monkeypatch, WORTHLESS), []
    invest = scene.learner.value.invest
    scene.learner.value.invest = lambda *given: reckoned.append(given) or invest(*given)
    for _ in range(50):
        assert not scene.pays(0.01)
    assert len(reckoned) == 1
    scene.learner.next_candidate += 1
    assert not scene.pays(0.01)
    scene.capacity.beside_requests = False
    assert scene.pays(0.01)
    assert len(reckoned) == 3
    scene.pays(1.0)
    assert len(reckoned) == 4


def slowed(slope, *, usual=1.3, noise=0.05, busy=0.6, seconds=120.0, trains=0.3):
    """Looks every quarter of a second at replicas whose forwards take ``slope`` longer beside a core that trains."""
    chance = random.Random(0)  # noqa: S311 - repeatable, not secret
    it, now, forwards, rest, trained, lost = Slowing(), 0.0, 0.0, 0.0, 0.0, 0.0
    while now < seconds:
        lost += it.observe([ReplicaLoad(1, 0, 1, 1.0, 1.0, forwards, rest)], trained, now)
        computes = chance.random() < trains
        done = 0.25 * busy / usual
        forwards += done * (usual + slope * computes) * (1 + chance.gauss(0, noise))
        now, rest, trained = now + 0.25, rest + done, trained + 0.25 * computes
    return it, lost, rest * trains


@pytest.mark.parametrize("slope", [0.0, 0.3, 0.8])
def test_the_slope_is_what_training_adds_and_not_what_is_always_there(slope):
    it, lost, beside = slowed(slope)
    assert it.slope == pytest.approx(slope, abs=0.06)
    assert lost == pytest.approx(slope * beside, abs=1.5)


def test_each_second_of_training_takes_less_where_rounds_run_less_of_the_time():
    much, little = (slowed(0.5, busy=busy, noise=0.01, seconds=400)[0].per_second for busy in (0.8, 0.2))
    assert much == pytest.approx(0.5 * 0.8 / 1.3, rel=0.15)
    assert little == pytest.approx(0.5 * 0.2 / 1.3, rel=0.3)


def test_nothing_is_lost_where_nothing_runs_or_a_replica_starts_anew():
    it = Slowing()
    load = ReplicaLoad(1, 0, 1, 1.0, 1.0, 5.0, 4.0)
    assert it.observe([load], 0.0, 0.0) == 0
    assert it.observe([load], 1.0, 1.0) == 0
    assert it.observe([ReplicaLoad(1, 0, 1, 1.0, 1.0, 0.5, 0.4)], 2.0, 2.0) == 0
    assert (it.slope, it.per_second) == (0, 0)


WORK = Workload(0.5, Demand(((0, 1, 1.0),), 10.0, 0.001), ((0.010, 0.012), (0.011, 0.014)), uptake=0.3, reading=0.001)


def scaled(work: Workload, by: float) -> Workload:
    return replace(work, rounds=tuple(tuple(by * one for one in each) for each in work.rounds))


def first(found: list[Workload]) -> float:
    return found[0].rounds[0][1]


def test_what_moves_from_second_to_second_is_told_as_its_average():
    it = TypicalRounds()
    assert it.of({"r": WORK}, 0.0) == [WORK]
    found = [it.of({"r": scaled(WORK, 1.5 if second % 2 else 0.5)}, float(second)) for second in range(1, 400)][-1]
    assert [list(each) for each in found[0].rounds] == [pytest.approx(each, rel=0.01) for each in WORK.rounds]
    assert replace(found[0], rounds=WORK.rounds) == WORK, "all else is as it is now"


def test_what_changed_for_good_is_believed_within_minutes():
    it = TypicalRounds()
    for second in range(1000):
        it.of({"r": WORK}, float(second))
    found = [first(it.of({"r": scaled(WORK, 2.0)}, 1000.0 + second)) for second in range(int(2 * WINDOW_SECONDS))]
    assert found == sorted(found)
    assert (found[0], found[-1]) == pytest.approx((0.012, 0.024), rel=0.15)


def test_calls_beside_recall_are_averaged_too():
    it = TypicalRounds()
    it.of({"r": replace(WORK, calls=(0.002, 0.004))}, 0.0)
    (found,) = it.of({"r": replace(WORK, calls=(0.004, 0.004))}, 1.0)
    assert found.calls == pytest.approx((0.003, 0.004), rel=0.01)


def test_replicas_are_told_apart_forgotten_when_they_leave_and_begun_anew_with_other_rounds():
    it = TypicalRounds()
    it.of({"a": WORK, "b": scaled(WORK, 3.0)}, 0.0)
    assert [one.rounds[0][0] for one in it.of({"a": WORK, "b": scaled(WORK, 3.0)}, 1.0)] == pytest.approx([0.01, 0.03])
    it.of({"a": WORK}, 2.0)
    assert it.of({"b": WORK}, 3.0) == [WORK]
    deeper = replace(WORK, rounds=((0.010, 0.012, 0.020), (0.011, 0.014, 0.021)))
    assert it.of({"b": deeper}, 4.0) == [deeper]
