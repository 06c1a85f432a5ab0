"""The measured speed-up on simulated machines with a known speed-up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from osd.economy.effect import BLOCK, CELL, LEAST_TRIALS, TRIAL, Effect, Step, estimate
from osd.economy.switchback import Switchback
from tests.unit.economy.machine import Machine

RUNS = 12
STEPS = 8000


def measured(machine: Machine, steps: int = STEPS) -> tuple[Effect, float]:
    """Return the effect that a switchback measures on a machine, and the true effect."""
    switchback = Switchback(measure=0.05, max_loss=0.05, seed=machine.seed)
    before, truth = switchback.measured, 0.0
    for _ in range(steps):
        switchback.observe(machine.step(switchback.drafts))
        if switchback.measured is not before:
            before, truth = switchback.measured, machine.true_log
    results = switchback.measured.effect
    assert results is not None
    return results, truth


@pytest.mark.parametrize("machine", [
    {"load": 0.25}, {"load": 0.6}, {"load": math.inf}, {"load": math.inf, "slots": 1},
    {"load": 0.6, "wander": 0.15, "wander_seconds": 10.0},
], ids=["quiet", "busy", "full", "one stream", "drifting"])  # fmt: skip
def test_speedup_is_unbiased_and_its_interval_covers_the_truth(machine: dict[str, Any]):
    results = [measured(Machine(seed=seed, **machine)) for seed in range(RUNS)]
    errors = np.array([effect.log - truth for effect, truth in results])
    assert abs(errors.mean()) < 0.0035
    assert np.mean([abs(effect.log - truth) < effect.width for effect, truth in results]) > 0.85
    assert np.mean([effect.width for effect, _ in results]) < 0.02


def test_arm_against_itself_has_no_effect():
    """Drafters that draft nothing: the measured effect is noise."""
    results = [measured(Machine(seed=seed, useless=True))[0] for seed in range(RUNS)]
    assert sum(abs(effect.log) < effect.width for effect in results) >= 11
    assert abs(np.mean([effect.log for effect in results])) < 0.002


def test_interval_holds_at_all_looks_together():
    missed = 0
    for seed in range(RUNS):
        machine, switchback = Machine(seed=seed, useless=True), Switchback(0.05, 0.05, seed)
        outside = False
        for step in range(STEPS):
            switchback.observe(machine.step(switchback.drafts))
            if step % 400 == 0 and (seen := switchback.measured.effect) is not None:
                outside |= abs(seen.log) > seen.width
        missed += outside
    assert missed <= 1


def test_interval_is_unknown_before_enough_trials():
    assert Effect(0.1, 0.01, LEAST_TRIALS - 1).interval[0] == 0
    assert 1 < Effect(0.1, 0.01, LEAST_TRIALS).interval[0] < math.exp(0.1)


def test_longer_drafts_do_not_look_like_a_slow_machine():
    """A step in predictable text drafts three tokens and takes longer; unpredictable text has no drafts."""
    rng, switchback = np.random.default_rng(0), Switchback(measure=0.5, max_loss=0.05, seed=0)
    unpredictable = predictable = tokens = since = 0
    seconds = 0.0
    for _ in range(STEPS):
        if not unpredictable and not predictable:
            unpredictable, predictable = rng.geometric([1 / 12, 1 / 24]).tolist()
        drafts = switchback.drafts and not unpredictable
        step = Step(1.6 if drafts else 1.0, 1, 0, min(4, predictable) if drafts else 1, 3 * drafts)
        if unpredictable:
            unpredictable -= 1
        else:
            predictable -= step.tokens
        since = since + 1 if switchback.drafts else 0
        if since > 2 * CELL:
            tokens, seconds = tokens + step.tokens, seconds + step.seconds
        switchback.observe(step)
    results = switchback.measured.effect
    assert results is not None
    assert results.log == pytest.approx(math.log(tokens / seconds), abs=0.01)


def test_first_steps_after_a_switch_do_not_count():
    """Drafting loses a tenth of the time, after eight steps in which its drafts are kept."""
    switchback = Switchback(measure=0.5, max_loss=0.005, seed=0)
    drafted, since, times_off = True, 100, 0
    for _ in range(STEPS):
        drafts = switchback.drafts
        drafted, since = drafts, since + 1 if drafts == drafted else 0
        drafting, plain = Step(1.1, 1, 0, 4 if since < 2 * CELL else 1), Step(3.0 if since < CELL else 1.0, 1, 0, 1)
        allowed = switchback.budget.allows
        switchback.observe(drafting if drafts else plain)
        times_off += allowed and not switchback.budget.allows
    assert times_off == 1
    assert not switchback.budget.allows
    results = switchback.measured.effect
    assert results is not None
    assert results.log == pytest.approx(-math.log(1.1), abs=0.01)


def test_more_streams_in_plain_blocks_do_not_bias_the_speedup():
    """Steps without noise; plain steps have twice as many streams, and more prompts."""
    rng, trials = np.random.default_rng(0), []
    plain = took = 0.0
    for _ in range(40):
        trial = np.zeros(TRIAL)
        for place in range(3 * BLOCK):
            is_plain = BLOCK <= place < 2 * BLOCK
            n = int(rng.integers(4, 12) if is_plain else rng.integers(2, 6))
            p = 16 * int(rng.integers(0, 4 if is_plain else 2))
            tokens = n if is_plain else n + int(rng.binomial(n, 0.5))
            seconds = (1.0 if is_plain else 1.5) * (1 + 0.1 * (n + p))
            trial[1 + place // CELL] += Step(seconds, n, p, tokens).sums()
            if not is_plain and place - 2 * BLOCK not in range(2 * CELL):
                plain, took = plain + 1 + 0.1 * (n + p) + (tokens / n - 1) * (1 + 0.1 * n), took + seconds
        trials.append(trial)
    results = estimate(trials)
    assert results is not None
    assert results[0].log == pytest.approx(math.log(plain / took), abs=0.002)
