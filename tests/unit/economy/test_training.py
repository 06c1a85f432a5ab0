"""The fund: costs of useless and useful training, and the slowdown that pauses measure."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from osd.economy import training
from osd.economy.report import Measured
from osd.economy.training import Fund, ServedVersion, Slot, decide, forecast, slowing

HOURS, LOOK = 4, 60.0
ERROR = 0.02  # of the logarithm that a minute measures


def measured(log: float, error: float, trials: int = 100) -> Measured:
    plain = 100 * math.exp(log)
    return Measured(trials=trials, drafted=100.0, plain=plain, variance=(plain * error) ** 2)


class Service:
    """Busy core in simulated time, while versions with given gains are trained and measured."""

    def __init__(self, gain, seed, drift_every=None, cost=15.0):
        self.fund, self.gain, self.rng, self.cost = Fund(), gain, np.random.default_rng(seed), cost
        self.level = self.current = self.saved = self.spent = 0.0  # logarithms, and core seconds
        self.number, self.looks, self.total = 0, 0, 0.0
        self.worst, self.drift_every = 0.0, drift_every
        self.fund.follow(1)

    @property
    def balance(self):
        return self.saved - self.spent

    def pass_minute(self, minute):
        fund = self.fund
        if self.drift_every and minute % self.drift_every == self.drift_every - 1:
            fund.drift()
            self.level = self.current = 0.0
            self.looks = 0
        fund.serve(LOOK)
        self.saved += math.expm1(self.level + self.current) * LOOK
        if self.looks is not None and self.number:
            self.measure()
        if decide(fund, 1.0, 0.005).begins:
            fund.learn(self.cost, 1.0)
            self.spent += self.cost
            fund.end_slice()
            self.number += 1
            fund.follow(self.number + 1, 0.05)
            self.level, self.current = self.level + self.current, self.gain(self.number - 1, self.rng)
            self.looks, self.total = 0, 0.0
        self.worst = min(self.worst, self.balance + 0.005 * LOOK * (minute + 1))

    def measure(self):
        self.looks += 1
        self.total += self.current + ERROR * self.rng.standard_normal()
        result = measured(self.total / self.looks, ERROR / math.sqrt(self.looks), 12 * self.looks)
        self.fund.measure({self.number + 1: result})
        effect = result.effect
        if effect.log + effect.width < 0 or (self.looks > 30 and effect.log < 0):  # taken back
            self.fund.follow(self.number)
            self.current, self.looks = 0.0, None

    def run(self):
        for minute in range(HOURS * 60):
            self.pass_minute(minute)
        return self


def services(gain, seeds=40, **options):
    return [Service(gain, seed, **options).run() for seed in range(seeds)]


def share(seconds):
    return seconds / (HOURS * 3600)


@pytest.mark.parametrize(("gain", "limit"), [(0.0, 0.0030), (-0.05, 0.0035)])
def test_useless_training_costs_a_small_share_of_the_time(gain, limit):
    assert np.mean([share(-service.balance) for service in services(lambda number, rng: gain)]) <= limit


def test_useful_training_gains_more_than_it_costs():
    gains = (0.1, 0.03, 0.01)
    result = services(lambda number, rng: gains[number] if number < 3 else 0.0)
    assert all(service.balance > 0.05 * HOURS * 3600 for service in result)
    assert np.mean([share(service.spent) for service in result]) < 0.015


CASES = {
    "useless": (lambda number, rng: 0.0, None),
    "gate is wrong": (lambda number, rng: -0.05, None),
    "by chance": (lambda number, rng: rng.choice([-0.01, 0.0, 0.03]), None),
    "forgotten": (lambda number, rng: 0.05, 20),
}


@pytest.mark.parametrize("case", CASES)
def test_balance_stays_above_the_bound_in_most_seeds(case):
    gain, drift_every = CASES[case]
    worst = [service.worst for service in services(gain, drift_every=drift_every)]
    print(case, np.quantile(worst, 0.05))
    assert np.quantile(worst, 0.05) > -27


def test_fund_without_doubling_spends_all_of_the_allowed_share(monkeypatch):
    monkeypatch.setattr(training, "_MOST_DOUBLINGS", 0)
    assert np.mean([share(service.spent) for service in services(lambda number, rng: 0.0)]) > 0.0045


def test_fund_of_mean_gains_spends_more_on_noise(monkeypatch):
    honest = np.mean([service.spent for service in services(lambda number, rng: 0.0)])
    monkeypatch.setattr(ServedVersion, "low", property(lambda version: version.log))
    assert np.mean([service.spent for service in services(lambda number, rng: 0.0)]) > 1.5 * honest


def with_version(log: float, error: float, promised: float = 0.05) -> Fund:
    fund = Fund()
    fund.follow(1)
    fund.follow(2, promised)
    fund.measure({2: measured(log, error)})
    fund.serve(1000.0)
    return fund


def test_fund_is_a_version_plus_shares_of_time_and_savings():
    fund = with_version(0.1, 0.01)
    (version,) = fund.versions
    assert 0 < version.low < 0.1
    assert fund.certain == pytest.approx(1000 * math.expm1(version.low))
    fund.learn(20.0, 0.5, lost=2.0)
    expected = 15 + 0.005 * 1000 + fund.certain / 2 - 12
    assert decide(fund, 1.0, 0.005).fund == pytest.approx(expected)


def test_gain_of_versions_in_service_adds_up():
    fund = with_version(0.1, 0.01)
    assert fund.saved == pytest.approx(1000 * math.expm1(0.1))
    fund.follow(3)
    assert fund.gain[0] == pytest.approx(0.1)
    fund.measure({3: measured(0.05, 0.01)})
    log, width = fund.gain
    assert log == pytest.approx(0.15)
    assert width > max(version.width for version in fund.versions)
    assert Fund().gain is None


def test_uncertain_savings_count_nothing_and_losses_count():
    assert with_version(0.02, 0.02).certain == 0
    assert with_version(-0.1, 0.01).certain == pytest.approx(1000 * math.expm1(-0.1))


def test_mixed_drafter_saves_over_recall_alone_while_it_does_not_rest():
    """Its versions have one effect together, and the time in which recall drafts alone saves nothing."""
    fund = with_version(0.5, 0.01)
    fund.measure_mixed(Measured(guarded=1))
    assert (fund.certain, fund.saved, fund.gain) == (0, 0, None), "effects of single versions do not count"
    fund.serve(1000.0)
    gain = measured(0.1, 0.01)
    fund.measure_mixed(replace(gain, guarded=1))
    assert fund.gain == pytest.approx((0.1, gain.effect.width))
    assert fund.certain == 0
    fund.measure_mixed(replace(gain, guarded=1, replicas=2))
    fund.serve(400.0)
    assert fund.saved == pytest.approx(200 * math.expm1(0.1))
    assert fund.certain == pytest.approx(200 * math.expm1(0.1 - gain.effect.width))
    fund.follow(1)
    assert fund.certain == pytest.approx(200 * math.expm1(0.1 - gain.effect.width))


def test_mixed_drafter_begins_again_after_an_alarm():
    fund = with_version(0.0, 0.01)
    fund.measure_mixed(measured(0.1, 0.01))
    fund.serve(200.0)
    certain = fund.certain
    fund.drift()
    assert (fund.certain, fund.saved, fund.gain) == (certain, certain, None)
    fund.measure_mixed(measured(0.1, 0.01))
    assert fund.certain == certain, "the time before counts once"


def test_gain_of_a_mixed_drafter_ends_the_doubling_once():
    fund = Fund()
    fund.fruitless = 3
    fund.measure_mixed(measured(0.1, 0.01))
    assert fund.fruitless == 0
    fund.fruitless = 2
    fund.measure_mixed(measured(0.11, 0.01))
    assert fund.fruitless == 2


@pytest.mark.parametrize("trials", [0, 2, 11])
def test_effect_of_few_trials_counts_nothing(trials):
    fund = with_version(0.0, 1.0)
    fund.measure({2: measured(0.5, 0.001, trials), 7: measured(0.5, 0.001)})
    assert fund.certain == 0


def test_slice_is_free_at_price_zero_and_doubles_nothing():
    fund = Fund()
    fund.learn(1000.0, 0.0)
    assert decide(fund, 0.0, 0.005).begins
    fund.end_slice()
    assert (fund.spent, fund.fruitless) == (0, 0)


def test_free_slice_waits_until_the_fund_covers_the_lost_seconds():
    fund = Fund()
    fund.learn(1000.0, 1.0, lost=training.VERSION_SECONDS)
    assert decide(fund, 0.0, 0.005).begins
    fund.learn(1000.0, 0.0, lost=1.0)
    decision = decide(fund, 0.0, 0.005)
    assert (decision.begins, decision.fund, decision.needed) == (False, -1.0, 0.0)
    fund.serve(200.0)
    assert decide(fund, 0.0, 0.005).begins


@pytest.mark.parametrize(("price", "fund"), [(0.0, 15.0), (0.5, 15.0), (1.0, 15.0), (2.0, 30.0)])
def test_fund_begins_with_a_version_and_grows_with_the_price(price, fund):
    assert decide(Fund(), price, 0.005).fund == fund


def test_paid_slice_doubles_the_need_until_a_gain_or_an_alarm():
    fund = Fund()
    fund.follow(1)
    needs = []
    for _ in range(3):
        needs.append(decide(fund, 1.0, 0.005).needed)
        fund.learn(15.0, 1.0)
        fund.end_slice()
    assert needs == [15, 30, 60]
    fund.follow(2, 0.05)
    fund.measure({2: measured(0.1, 0.01)})
    assert decide(fund, 1.0, 0.005).needed == 15
    fund.learn(15.0, 1.0)
    fund.end_slice()
    assert decide(fund, 1.0, 0.005).needed == 30
    fund.drift()
    assert decide(fund, 1.0, 0.005).needed == 15


def test_covered_slice_runs_to_its_end():
    fund = Fund()
    fund.learn(100.0, 1.0)
    assert not decide(fund, 1.0, 0.005).begins
    assert decide(fund, 1.0, 0.005, begun=True).begins


def test_version_taken_back_saves_nothing_more():
    fund = with_version(0.1, 0.01)
    saved = fund.certain
    fund.follow(1)
    fund.serve(1000.0)
    assert fund.certain == saved
    fund.follow(3, 0.1)
    assert [version.number for version in fund.versions] == [3]


def test_alarm_of_drift_ends_the_savings():
    fund = with_version(0.1, 0.01)
    saved = fund.certain
    fund.drift()
    fund.serve(1000.0)
    fund.follow(2)
    assert fund.certain == saved
    assert not fund.versions


def test_fund_survives_a_checkpoint():
    fund = with_version(0.1, 0.01)
    fund.learn(3.0, 1.0, 0.1)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(fund)), Fund) == fund


def test_checkpoint_names_the_mean_slice_version():
    fund = Fund()
    fund.learn(45.0, 1.0)
    fund.end_slice()
    assert fund.mean_slice == (training.VERSION_SECONDS + 45.0) / 2
    assert msgspec.to_builtins(fund)["version"] == fund.mean_slice


def test_forecast_scales_the_promise_by_measured_gains():
    assert forecast(Fund(), None, 0.0) == math.inf
    assert forecast(Fund(), 0.1, 2.0) == pytest.approx(0.2)
    assert forecast(Fund(), -0.1, 2.0) == 0
    half = with_version(0.05, 0.001, promised=0.1)
    assert forecast(half, 0.1, 1.0) == pytest.approx(0.1 * 0.06 / 0.11)
    half.drift()
    assert forecast(half, 0.1, 1.0) == pytest.approx(0.1 * 0.06 / 0.11)


def slots(slower: float, count: int, seed: int = 0, noise: float = 0.05) -> list[Slot]:
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        paused = rng.random() < 0.2
        steps = int(rng.integers(20, 60))
        rows = steps * int(rng.integers(1, 9)) * (1 if paused else 2)  # pauses meet smaller steps
        seconds = (0.01 * steps + 0.002 * rows) * math.exp(noise * rng.standard_normal())
        result.append(Slot(paused, steps, rows, seconds * (1 if paused else slower)))
    return result


def test_slowing_is_separate_from_the_size_of_steps():
    errors = [
        (log - math.log(slower), error)
        for slower in (1.0, 1.1)
        for seed in range(20)
        for log, error in [slowing(slots(slower, 200, seed))]
    ]
    assert abs(np.mean([off for off, _ in errors])) < 0.01
    assert np.mean([abs(off) < 2.5 * error for off, error in errors]) >= 0.9


def test_slowing_is_unknown_without_slots_of_both_kinds():
    assert slowing([]) == (0.0, math.inf)
    assert slowing([Slot(False, 10, 10, 1.0)] * 20) == (0.0, math.inf)
