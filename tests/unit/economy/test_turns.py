"""Two versions that take turns, on simulated machines with a known effect."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from osd.economy import turns as module
from osd.economy.effect import BLOCK, Effect, Step
from osd.economy.report import Measured
from osd.economy.switchback import BEGIN_SECONDS, Bank
from osd.economy.turns import Turns
from tests.unit.economy.machine import Machine

STEPS = 3000
BUSY: dict[str, Any] = {"load": math.inf, "slots": 8}
COSTS = np.array([8.0e-3, 8.0e-3 * 0.018 + 0.12e-3, 8.0e-3 * 0.018])
"""Costs of plain steps of the simulated machine."""


def effect_on(machine: Machine, share: float = 0.5, steps: int = STEPS, costs: np.ndarray | None = None) -> Effect:
    turns = Turns(share, machine.seed)
    for _ in range(steps):
        turns.observe(machine.step(True, turns.candidate), costs)
    effect = turns.measured.effect
    assert effect is not None
    return effect


def truth(candidate: float, **machine: Any) -> float:
    """Return the effect of a candidate, from runs with each version alone."""
    logs = []
    for accept in (0.36, candidate):
        alone = [Machine(seed=seed, accept=accept, **machine) for seed in range(12)]
        for run in alone:
            for _ in range(STEPS):
                run.step(True)
        logs.append(np.mean([run.true_log for run in alone]))
    return float(logs[1] - logs[0])


@pytest.mark.parametrize(("machine", "costs"), [
    (BUSY, None),
    (BUSY, COSTS),
    ({"load": math.inf, "slots": 1}, None),
    ({**BUSY, "wander": 0.15, "wander_seconds": 10.0}, None),
], ids=["fitted costs", "known costs", "one stream", "drifting"])  # fmt: skip
def test_version_against_itself_has_no_effect(machine: dict[str, Any], costs: np.ndarray | None):
    """Zero is inside a fixed interval at the end in 93 of 100 runs, and inside the confidence sequence always in 90."""
    ends, looks, runs = 0, 0, 40
    for seed in range(runs):
        turns, run = Turns(0.5, seed), Machine(seed=seed, candidate=0.36, **machine)
        held = True
        for step in range(STEPS):
            turns.observe(run.step(True, turns.candidate), costs)
            if step % 100 == 0 and (effect := turns.measured.effect) is not None:
                held &= abs(effect.log) <= effect.width
        effect = turns.measured.effect
        assert effect is not None
        ends += abs(effect.log) <= 2.05 * effect.error
        looks += held
    print(f"zero inside at the end in {ends} of {runs} runs, at all looks in {looks}")
    assert ends >= 0.925 * runs
    assert looks >= 0.9 * runs


@pytest.mark.parametrize(("candidate", "drift", "costs", "bias"), [
    (0.42, {}, COSTS, 0.003),
    (0.3, {}, COSTS, 0.003),
    (0.42, {"wander": 0.15, "wander_seconds": 10.0}, COSTS, 0.003),
    (0.42, {}, None, 0.005),
], ids=["better", "worse", "drifting", "fitted costs"])  # fmt: skip
def test_effect_is_unbiased_and_its_interval_covers_it(
    candidate: float, drift: dict[str, Any], costs: np.ndarray | None, bias: float
):
    true = truth(candidate, **BUSY)
    effects = [effect_on(Machine(seed=seed, candidate=candidate, **BUSY, **drift), costs=costs) for seed in range(40)]
    errors = np.array([effect.log - true for effect in effects])
    mean_error = np.mean([effect.error for effect in effects])
    print(f"truth {true:+.4f}, bias {errors.mean():+.4f}, standard error {mean_error:.4f}")
    assert abs(errors.mean()) < bias
    assert np.mean([abs(effect.log - true) < 2.05 * effect.error for effect in effects]) >= 0.9


@pytest.mark.parametrize(
    ("slots", "candidate", "minutes"), [(1, 0.322, 6), (1, 0.395, 6), (8, 0.316, 0.6), (8, 0.402, 0.6)]
)
def test_effect_of_five_percent_is_certain_in_time(slots: int, candidate: float, minutes: float):
    """The effect is certain within twice the expected busy minutes in 8 of 10 runs."""
    certain = 0
    for seed in range(10):
        turns, machine = Turns(0.5, seed), Machine(seed=seed, candidate=candidate, load=math.inf, slots=slots)
        while machine.now < 60 * 2 * minutes:
            turns.observe(machine.step(True, turns.candidate))
            effect = turns.measured.effect
            if effect is not None and abs(effect.log) > effect.width:
                certain += (effect.log > 0) == (candidate > 0.36)
                break
    print(f"{certain} of 10 runs are certain")
    assert certain >= 8


def test_reading_missed_tokens_is_not_part_of_the_effect(monkeypatch: pytest.MonkeyPatch):
    """A candidate with few blocks has many tokens to read. Without a washout this would look like a loss."""

    def bias() -> float:
        pairs = [[Machine(seed=seed, candidate=0.4, read=read, **BUSY) for read in (0.04e-3, 0.0)] for seed in range(4)]
        return float(np.mean([effect_on(reads, 0.1).log - effect_on(reads_not, 0.1).log for reads, reads_not in pairs]))

    assert abs(bias()) < 0.003
    monkeypatch.setattr(module, "WASHOUT", 0)
    assert bias() < -0.1


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 0.8, 1.0])
def test_candidate_drafts_in_its_share_of_the_blocks(share: float):
    turns, candidate, blocks = Turns(share, 0), 0, 4000
    for _ in range(blocks):
        arms = set()
        for _ in range(BLOCK):
            arms.add(turns.candidate)
            turns.observe(Step(1.0, 1, 0, 1))
        assert len(arms) == 1
        candidate += arms == {True}
    assert candidate / blocks == pytest.approx(share, abs=0.02)


def test_order_in_each_pair_is_a_fair_coin():
    turns, order = Turns(0.5, 0), []
    for _ in range(1000 * 2 * BLOCK):
        order.append(turns.candidate)
        turns.observe(Step(1.0, 1, 0, 1))
    blocks = [order[start : start + BLOCK] for start in range(0, len(order), BLOCK)]
    pairs = [(first[0], second[0]) for first, second in zip(blocks[::2], blocks[1::2], strict=True)]
    counts = Counter(pairs)
    assert counts.keys() == {(True, False), (False, True)}
    assert counts[True, False] == pytest.approx(500, abs=60)
    assert max(len(list(run)) for _, run in groupby(order)) == 2 * BLOCK


def test_interrupted_pair_begins_again():
    turns = Turns(0.5, 0)
    for _ in range(30):
        for _ in range(2 * BLOCK - 1):
            turns.observe(Step(1.0, 1, 0, 1))
        turns.interrupt()
    assert turns.measured.effect is None
    for _ in range(2 * 2 * BLOCK):
        turns.observe(Step(1.0, 1, 0, 1))
    assert turns.measured.trials == 2


def test_pending_pair_keeps_its_order_when_interrupted():
    turns = Turns(0.5, 0)
    before = turns.candidate
    for _ in range(50):
        turns.interrupt()
        assert turns.candidate == before


def test_steps_without_a_stream_do_not_count():
    turns, before = Turns(0.5, 0), []
    for _ in range(100):
        before.append(turns.candidate)
        turns.observe(Step(1.0, 0, 48, 0))
    assert len(set(before)) == 1


def test_joined_pairs_keep_the_estimate_and_its_error(monkeypatch: pytest.MonkeyPatch):
    kept = effect_on(Machine(seed=1, candidate=0.42, **BUSY), steps=40 * 2 * BLOCK)
    monkeypatch.setattr(module, "MOST_TRIALS", 16)
    joined = effect_on(Machine(seed=1, candidate=0.42, **BUSY), steps=40 * 2 * BLOCK)
    assert joined.trials == kept.trials >= 32
    assert joined.log == pytest.approx(kept.log, abs=1e-3)
    assert joined.error == pytest.approx(kept.error, rel=0.5)


def test_pairs_count_for_a_limited_time(monkeypatch: pytest.MonkeyPatch):
    """The effect turns within the time that pairs count; joined pairs expire too."""

    def effect(kept: float) -> Effect:
        turns = Turns(0.5, 0, kept)
        for accept in (0.42, 0.3):
            machine = Machine(seed=1, candidate=accept, **BUSY)
            while machine.now < 30.0:
                turns.observe(machine.step(True, turns.candidate), COSTS)
        assert turns.measured.effect is not None
        return turns.measured.effect

    always = effect(math.inf)
    monkeypatch.setattr(module, "MOST_TRIALS", 16)
    lately = effect(20.0)
    assert lately.log < -0.03 < always.log
    assert lately.trials < always.trials / 2


@pytest.mark.parametrize(("measured", "settled"), [
    (Measured(), False), (Measured(11, 50.0, 60.0, 0.01), False), (Measured(40, 50.0, 60.0, 0.01), True),
    (Measured(40, 50.0, 45.0, 0.01), True), (Measured(40, 50.0, 50.0, 1.0), False),
    (Measured(40, 50.0, 50.1, 0.001), True), (Measured(40, 320.0, 320.0, 900.0), True),
], ids=["nothing", "few pairs", "better", "worse", "uncertain", "no effect", "long"])  # fmt: skip
def test_result_is_known_when_certain_narrow_or_long_measured(measured: Measured, settled: bool):
    turns = Turns(0.75, 0)
    turns.measured = measured
    assert turns.settled is settled


@pytest.mark.parametrize(
    ("slots", "candidate", "share"), [(1, 0.37, 1.0), (1, 0.45, 1.0), (8, 0.4, 1.0), (1, 0.27, 0.0), (8, 0.32, 0.0)]
)
def test_pairs_cost_the_bank_as_much_as_they_lose(slots: int, candidate: float, share: float):
    """A bank pays for the losses of pairs: steps with the worse version, and less accurate drafts after each switch."""
    seconds, measure, losses, spent = 200.0, 0.005, [], []
    for seed in range(6):
        work = {}
        for has_pairs in (True, False):
            machine, turns, bank = _quiet(slots, candidate, seed), Turns(share, seed), Bank()
            tokens = 0
            while machine.now < seconds:
                step = machine.step(True, turns.candidate if has_pairs else share == 1.0)
                tokens += step.tokens
                bank.add(measure * step.seconds)
                turns.observe(step, bank=bank)
            work[has_pairs] = tokens
            if has_pairs:
                spent.append(bank.spent / seconds)
                assert turns.measured.trials > 0
        losses.append(1 - work[True] / work[False])
    loss, paid = np.mean(losses), np.mean(spent)
    print(f"lost {loss:.2%}, paid {paid:.2%}")
    assert paid <= measure + (BEGIN_SECONDS + 0.5) / seconds
    assert loss <= paid + 0.01


def test_pairs_follow_each_other_while_the_bank_covers_them():
    turns, bank, candidate = Turns(1.0, 0), Bank(), []
    for _ in range(20_000):
        candidate.append(turns.candidate)
        bank.add(0.005 * 0.01)
        turns.observe(Step(0.01, 1, 0, 2 if turns.candidate else 1), bank=bank)
    first = candidate.index(True, candidate.index(False))
    blocks = [candidate[start : start + BLOCK] for start in range(0, len(candidate), BLOCK)]
    runs = [len(list(run)) for stable, run in groupby(blocks, lambda block: not block[0]) if stable]
    assert first < 3 * BLOCK, "a new bank pays at once"
    assert max(runs) <= 2
    assert bank.seconds > -0.2, "the bank pays"
    assert 0.002 < np.mean(np.logical_not(candidate)) < 0.1


def _quiet(slots: int, candidate: float, seed: int) -> Machine:
    return Machine(seed=seed, slots=slots, load=math.inf, candidate=candidate, noise=0.0, wander=0.0, read=0.0)
