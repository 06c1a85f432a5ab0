"""The loss budget: by arithmetic, and on simulated machines with drafters that are useless or change."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from osd.economy.effect import LEAST_TRIALS, Step
from osd.economy.guard import BUCKET_SECONDS, LossBudget
from osd.economy.switchback import Switchback
from tests.unit.economy.machine import Machine

MAX_LOSS = 0.005
SECONDS = 1200.0
PROBES_SECONDS = 0.5
"""Most that probes lose in a simulation beyond their expected loss."""


def test_bucket_is_overdrawn_by_one_measurement_and_probes():
    rng = np.random.default_rng(0)
    for _ in range(200):
        budget, lost, busy, began, largest = LossBudget(MAX_LOSS), 0.0, 0.0, 0.0, 0.0
        for log in rng.normal(rng.normal(0, 0.1), 0.1, 3000):
            seconds = float(rng.exponential(10.0)) if budget.allows else 0.8
            if not budget.allows and not budget.pays_for(seconds, busy - began):
                seconds = 0.0
            budget.passed(seconds + 1)
            busy += seconds + 1
            if seconds:
                began = busy
                budget.measured(float(log), seconds)
                lost -= math.expm1(log) * seconds
                largest = max(largest, -math.expm1(log) * seconds)
            assert lost <= MAX_LOSS * busy + BUCKET_SECONDS + largest + PROBES_SECONDS


def test_comparisons_of_versions_get_half_of_the_price():
    switchback, step = Switchback(0.005, MAX_LOSS, seed=0), Step(10.0, 1, 0, 1)
    for compares, paid in ((False, (0.05, 0.0)), (True, (0.025, 0.025))):
        before = switchback.bank.seconds, switchback.versions.seconds
        switchback.compares = compares
        switchback.observe(step)
        after = switchback.bank.seconds, switchback.versions.seconds
        assert np.subtract(after, before) == pytest.approx(paid)


def test_gains_beyond_the_bucket_are_lost():
    budget = LossBudget(MAX_LOSS)
    budget.measured(0.5, 3600.0)
    assert budget.seconds == BUCKET_SECONDS
    budget.measured(-0.5, 20.0)
    assert not budget.allows


def test_drafting_returns_after_probes_gain_and_half_a_refill():
    budget = LossBudget(MAX_LOSS)
    budget.measured(-0.5, 13.0)
    assert not budget.allows
    for _ in range(LEAST_TRIALS - 1):
        budget.measured(0.1, 1.0)
    assert not budget.allows, "the bucket is not half full"
    budget.passed(500.0)
    budget.measured(0.1, 1.0)
    assert budget.allows


def test_drafting_that_gains_returns_soon_after_a_wrong_trial():
    machine, switchback = Machine(load=math.inf, slots=8, gain=lambda now: 0.36), Switchback(0.005, MAX_LOSS, seed=0)
    while switchback.measured.trials < 2:
        switchback.observe(machine.step(switchback.drafts))
    switchback.budget.measured(-1.0, 3 * BUCKET_SECONDS)
    assert not switchback.budget.allows
    wrong = switchback.busy
    while not switchback.budget.allows:
        switchback.observe(machine.step(switchback.drafts))
    assert switchback.busy - wrong < 300, "an overdrawn bucket alone takes 900 s to refill"


@pytest.mark.parametrize("seed", range(4))
def test_drafting_that_gains_on_average_is_never_switched_off(seed: int):
    """A trial in five seconds without acceptance does not stand for the fifteen with it."""
    machine = Machine(load=math.inf, slots=8, call=2.5e-3, gain=lambda now: 0.95 if int(now) % 20 > 5 else 0.0)
    switchback = Switchback(0.005, MAX_LOSS, seed=seed)
    while machine.now < 240:
        switchback.observe(machine.step(switchback.drafts))
        assert switchback.budget.allows
    assert machine.true_log > 0.2


@pytest.mark.parametrize(("gain", "most", "least"), [
    (lambda now: 0.0, MAX_LOSS * SECONDS + BUCKET_SECONDS + 3, None),
    (lambda now: 0.45 if now // 300 % 2 == 0 else 0.0, 0.0, 0.1),
    (lambda now: 0.36, 0.0, 0.9),
], ids=["useless", "square wave", "useful"])  # fmt: skip
def test_loss_of_a_drafter_is_bounded_and_its_gain_is_kept(
    gain: Callable[[float], float], most: float, least: float | None
):
    """Drafting loses at most ``most`` seconds and keeps at least the share ``least`` of its possible gain."""
    machine = Machine(load=math.inf, slots=8, gain=gain)
    switchback = Switchback(0.005, MAX_LOSS, seed=0)
    kept = best = 0.0
    while machine.now < SECONDS:
        plain, took, now = machine.plain_seconds, machine.seconds, machine.now
        step = machine.step(switchback.drafts)
        switchback.observe(step)
        kept += machine.plain_seconds - plain - (machine.seconds - took)
        best += step.seconds * (0.1 if gain(now) else 0.0)
    assert kept > -most
    if least is not None:
        assert kept > least * best
    assert switchback.bank.spent < 0.005 * switchback.busy + 6.0
