from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from osd.learning.batch import collate
from osd.learning.gate import ERROR, Gate, PairedTest
from tests.unit.learning.toys import VOCABULARY, Toy, gate_figures, make_trace, target_logits

GATE = Gate(depth=2, divergence="forward_kl", min_positions=100)


def drafter(share):
    """Return a drafter between uniform (0) and the target (1)."""
    toy = Toy()
    with torch.no_grad():
        toy.table.weight.copy_(torch.tensor(target_logits()).float() * share)
        toy.read.weight.zero_()
        toy.read.bias.zero_()
    return toy


def held_out(records=8):
    return [collate([make_trace(f"{n}", completion=30, seed=n)]) for n in range(records)]


class HeldOut:
    """Held-out records that count how many of them are read."""

    def __init__(self, records):
        self.records, self.read = records, 0

    def __call__(self):
        for batch in held_out(self.records):
            self.read += 1
            yield batch


@pytest.mark.parametrize(
    ("candidate", "baseline", "passed", "reason"),
    [(0.9, 0.1, True, "tokens per step"), (0.1, 0.9, False, "acceptance per position fell")],
)
def test_clear_difference_ends_the_evaluation_early(candidate, baseline, passed, reason):
    records = HeldOut(60)
    verdict = GATE.judge(drafter(candidate), drafter(baseline), records)
    assert (verdict.passed, verdict.waits) == (passed, False)
    assert 4 <= records.read <= 25, "and not before there are enough positions"
    assert reason in verdict.reason
    figures = verdict.figures()
    for name in ("acceptance", "expected_length"):
        assert (figures[name] > figures[f"baseline_{name}"] + 0.1) is passed
    assert len(figures["per_depth"]) == len(figures["baseline_per_depth"]) == 2
    assert figures["positions"] == figures["baseline_positions"] == 30 * records.read


def test_unclear_difference_uses_all_records():
    records = HeldOut(20)
    assert GATE.judge(drafter(0.5), drafter(0.5), records).passed
    assert records.read == 20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected(value):
    bad = drafter(0.9)
    with torch.no_grad():
        bad.table.weight[VOCABULARY - 1, 0] = value
    verdict = GATE.judge(bad, drafter(0.1), held_out)
    assert not verdict.passed
    assert "table.weight" in verdict.reason


def test_too_few_held_out_positions_wait():
    verdict = GATE.judge(drafter(0.9), drafter(0.1), lambda: held_out(3))
    assert not verdict.passed
    assert verdict.waits
    assert verdict.reason == "not enough held-out records: 90 positions of 100"
    assert verdict.figures()["positions"] == 90


def test_exactly_the_minimum_of_positions_is_enough():
    verdict = Gate(2, "forward_kl", min_positions=90).judge(drafter(0.9), drafter(0.1), lambda: held_out(3))
    assert verdict.passed


def figures(overlaps, per_depth, groups=None):
    overlaps = torch.tensor(overlaps, dtype=torch.float64)
    return gate_figures(per_depth, len(overlaps), overlaps=overlaps, groups=groups)


def test_noise_is_tolerated_within_error_and_limit():
    base = torch.full((400,), 0.5).tolist()
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).mul(0.04)
    noise -= noise.mean()  # standard error 0.002
    slightly = figures([b + n - 0.001 for b, n in zip(base, noise.tolist(), strict=True)], (0.5, 0.5))
    clearly = figures([b + n - 0.004 for b, n in zip(base, noise.tolist(), strict=True)], (0.5, 0.5))
    assert GATE.decide(slightly, figures(base, (0.5, 0.5))).passed
    assert not GATE.decide(clearly, figures(base, (0.5, 0.5))).passed
    wild = figures([b + 100 * n - 0.006 for b, n in zip(base, noise.tolist(), strict=True)], (0.5, 0.5))
    assert not GATE.decide(wild, figures(base, (0.5, 0.5))).passed


def test_paired_comparison_detects_a_small_fall():
    base = torch.rand(400, generator=torch.Generator().manual_seed(0))  # one standard error of their mean is 0.014
    lower = figures((base - 0.002).tolist(), (0.5, 0.5))
    assert not GATE.decide(lower, figures(base.tolist(), (0.5, 0.5))).passed


def test_standard_error_groups_positions_by_sequence():
    groups = torch.arange(400) // 100
    base = figures([0.5] * 400, (0.5, 0.5), groups)
    moved = [0.5 + (0.02, -0.02, 0.02, -0.028)[n // 100] for n in range(400)]
    # The mean fell by 0.002: one standard error by sequence is 0.011, by position 0.0011.
    assert GATE.decide(figures(moved, (0.5, 0.5), groups), base).passed
    alone = torch.arange(400)
    assert not GATE.decide(figures(moved, (0.5, 0.5), alone), figures([0.5] * 400, (0.5, 0.5), alone)).passed


def test_standard_error_excludes_the_mean_difference():
    # All positions of a single sequence fell by 0.001: there is no noise.
    single = torch.zeros(400, dtype=torch.int64)
    fallen, base = figures([0.499] * 400, (0.5, 0.5), single), figures([0.5] * 400, (0.5, 0.5), single)
    assert not GATE.decide(fallen, base).passed


def test_expected_length_may_fall_within_the_noise():
    noise = torch.tensor([0.04, -0.04]).repeat(200)  # standard error 0.002
    moved, base = figures((noise + 0.5).tolist(), (0.4995, 0.5)), figures([0.5] * 400, (0.5, 0.5))
    assert GATE.decide(moved, base).passed
    assert not GATE.decide(figures((noise + 0.5).tolist(), (0.49, 0.5)), base).passed


def test_lower_expected_length_is_rejected():
    same = [0.5] * 200
    verdict = GATE.decide(figures(same, (0.3, 0.7)), figures(same, (0.7, 0.3)))
    assert not verdict.passed
    assert "tokens per step fell from 1.910 to 1.510" in verdict.reason


def test_least_gain_counts_tokens_with_recall():
    same, base = (
        [0.5] * 200,
        gate_figures((0.4, 0.4), 200, overlaps=torch.full((200,), 0.5, dtype=torch.float64), weight=0.2),
    )
    better = gate_figures((0.5, 0.4), 200, overlaps=torch.full((200,), 0.5, dtype=torch.float64), weight=0.2)
    decision = GATE.decide(better, base)
    gain = decision.log_gain
    assert decision.passed
    assert 0.01 < gain < 0.02, "without recall 0.09"
    assert decision.with_least_gain(0.01) is decision
    refused = decision.with_least_gain(0.02)
    assert (refused.passed, refused.waits, refused.log_gain) == (False, False, gain)
    assert refused.reason == "expected tokens per step 1.560 -> 1.700, less than 2% more in service"
    fallen = GATE.decide(figures(same, (0.3, 0.7)), figures(same, (0.7, 0.3)))
    assert fallen.with_least_gain(0.01) is fallen


def test_figures_with_nan_never_pass():
    nan = figures([float("nan")] * 200, (float("nan"), 0.5))
    assert not GATE.decide(nan, figures([0.1] * 200, (0.1, 0.1))).passed


def chance_of_error(win: float, lose: float, looks: int) -> float:
    """Return the exact probability that a test of fair gambles calls a side better within ``looks`` gambles.

    Each gamble brings ``win`` or ``-lose``. The state of the test depends on the number of wins only, so the
    probability is a sum over paths that have not passed yet. ``wins`` has the
    minimum number of wins to pass, by gamble.
    """
    test, won, wins = PairedTest(), 0, list[int]()
    while test.better is None:
        test.add([win])
        won += 1
        wins.append(won if test.better == "first" else won + 1)
    while len(wins) < looks:
        lost = copy.deepcopy(test)
        lost.add([-lose])
        if lost.better == "first":
            test = lost
        else:
            test.add([win])
            won += 1
        wins.append(won)
    chance, paths, passed = lose / (win + lose), np.zeros(looks + 2), 0.0
    paths[0] = 1.0
    for fewest in wins:
        paths[1:] = (1 - chance) * paths[1:] + chance * paths[:-1]
        paths[0] *= 1 - chance
        passed += paths[fewest:].sum()
        paths[fewest:] = 0.0
    return passed


@pytest.mark.parametrize(("win", "lose"), [(1.0, 1.0), (0.3, 0.3), (0.1, 0.9), (0.9, 0.1)])
def test_paired_test_errs_in_at_most_one_of_twenty(win, lose):
    chance = chance_of_error(win, lose, 1000)
    print(f"chance of error {chance:.4f}")
    assert 0.01 < chance <= ERROR


@pytest.mark.parametrize(("mean", "side"), [(0.25, "first"), (-0.25, "second")])
def test_paired_test_decides_within_thirty_records(mean, side):
    looks = []
    for run in range(40):
        test, random = PairedTest(), np.random.default_rng(run)
        while test.better is None:
            test.add([mean + random.uniform(-0.2, 0.2)])
            looks.append(run)
        assert test.better == side
    assert np.median(np.bincount(looks)) <= 30


def test_paired_test_survives_losses_and_nan():
    test = PairedTest()
    test.add([-1.0] * 5)
    assert test.better is None
    test.add([1.0] * 60)
    assert test.better == "first"
    test.add([float("nan"), *[0.5] * 100])
    assert test.better is None
