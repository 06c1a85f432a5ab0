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
    """Between uniform (0) and the target itself (1)."""
    toy = Toy()
    with torch.no_grad():
        toy.table.weight.copy_(torch.tensor(target_logits()).float() * share)
        toy.read.weight.zero_()
        toy.read.bias.zero_()
    return toy


def held_out(records=8):
    return [collate([make_trace(f"{n}", completion=30, seed=n)]) for n in range(records)]


class Given:
    """Held-out records, as many as are asked for."""

    def __init__(self, records):
        self.records, self.asked = records, 0

    def __call__(self):
        for batch in held_out(self.records):
            self.asked += 1
            yield batch


@pytest.mark.parametrize(
    ("one", "other", "passed", "reason"),
    [(0.9, 0.1, True, "tokens per round"), (0.1, 0.9, False, "acceptance per position fell")],
)
def test_what_is_clear_is_decided_before_all_records_were_looked_at(one, other, passed, reason):
    given = Given(60)
    verdict = GATE.judge(drafter(one), drafter(other), given)
    assert (verdict.passed, verdict.waits) == (passed, False)
    assert 4 <= given.asked <= 25, "and not before there are enough positions"
    assert reason in verdict.reason
    figures = verdict.figures()
    for name in ("acceptance", "expected_length"):
        assert (figures[name] > figures[f"baseline_{name}"] + 0.1) is passed
    assert len(figures["per_depth"]) == len(figures["baseline_per_depth"]) == 2
    assert figures["positions"] == figures["baseline_positions"] == 30 * given.asked


def test_what_is_not_clear_is_decided_by_all_records():
    given = Given(20)
    assert GATE.judge(drafter(0.5), drafter(0.5), given).passed
    assert given.asked == 20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_rejects(value):
    bad = drafter(0.9)
    with torch.no_grad():
        bad.table.weight[VOCABULARY - 1, 0] = value
    verdict = GATE.judge(bad, drafter(0.1), held_out)
    assert not verdict.passed
    assert "table.weight" in verdict.reason


def test_too_few_held_out_positions_wait_instead_of_judging():
    verdict = GATE.judge(drafter(0.9), drafter(0.1), lambda: held_out(3))
    assert not verdict.passed
    assert verdict.waits
    assert verdict.reason == "not enough held-out records: 90 positions of 100"
    assert verdict.figures()["positions"] == 90


def test_exactly_as_many_positions_as_are_needed_are_judged():
    verdict = Gate(2, "forward_kl", min_positions=90).judge(drafter(0.9), drafter(0.1), lambda: held_out(3))
    assert verdict.passed


def figures(overlaps, per_depth, groups=None):
    overlaps = torch.tensor(overlaps, dtype=torch.float64)
    return gate_figures(per_depth, len(overlaps), overlaps=overlaps, groups=groups)


def test_noise_is_tolerated_up_to_one_standard_error_but_never_beyond_the_limit():
    base = torch.full((400,), 0.5).tolist()
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).mul(0.04)
    noise -= noise.mean()  # standard error 0.002
    slightly = figures([b + n - 0.001 for b, n in zip(base, noise.tolist(), strict=True)], (0.5, 0.5))
    clearly = figures([b + n - 0.004 for b, n in zip(base, noise.tolist(), strict=True)], (0.5, 0.5))
    assert GATE.decide(slightly, figures(base, (0.5, 0.5))).passed
    assert not GATE.decide(clearly, figures(base, (0.5, 0.5))).passed
    wild = figures([b + 100 * n - 0.006 for b, n in zip(base, noise.tolist(), strict=True)], (0.5, 0.5))
    assert not GATE.decide(wild, figures(base, (0.5, 0.5))).passed


def test_the_comparison_is_paired_so_that_what_differs_between_positions_hides_no_fall():
    base = torch.rand(400, generator=torch.Generator().manual_seed(0))  # one standard error of their mean is 0.014
    lower = figures((base - 0.002).tolist(), (0.5, 0.5))
    assert not GATE.decide(lower, figures(base.tolist(), (0.5, 0.5))).passed


def test_positions_of_one_sequence_do_not_count_as_independent():
    groups = torch.arange(400) // 100
    base = figures([0.5] * 400, (0.5, 0.5), groups)
    moved = [0.5 + (0.02, -0.02, 0.02, -0.028)[n // 100] for n in range(400)]
    # The mean fell by 0.002: one standard error by sequence is 0.011, by position 0.0011.
    assert GATE.decide(figures(moved, (0.5, 0.5), groups), base).passed
    alone = torch.arange(400)
    assert not GATE.decide(figures(moved, (0.5, 0.5), alone), figures([0.5] * 400, (0.5, 0.5), alone)).passed


def test_the_standard_error_is_of_the_differences_about_their_mean():
    # All positions of the one sequence fell alike, by 0.001: there is no noise that could explain it.
    one = torch.zeros(400, dtype=torch.int64)
    fallen, base = figures([0.499] * 400, (0.5, 0.5), one), figures([0.5] * 400, (0.5, 0.5), one)
    assert not GATE.decide(fallen, base).passed


def test_expected_tokens_per_round_may_fall_by_what_the_noise_of_each_depth_explains():
    noise = torch.tensor([0.04, -0.04]).repeat(200)  # standard error 0.002
    moved, base = figures((noise + 0.5).tolist(), (0.4995, 0.5)), figures([0.5] * 400, (0.5, 0.5))
    assert GATE.decide(moved, base).passed
    assert not GATE.decide(figures((noise + 0.5).tolist(), (0.49, 0.5)), base).passed


def test_a_drop_of_expected_tokens_per_round_rejects_even_when_the_mean_overlap_holds():
    same = [0.5] * 200
    verdict = GATE.decide(figures(same, (0.3, 0.7)), figures(same, (0.7, 0.3)))
    assert not verdict.passed
    assert "tokens per round fell from 1.910 to 1.510" in verdict.reason


def test_figures_that_are_not_finite_never_pass():
    nan = figures([float("nan")] * 200, (float("nan"), 0.5))
    assert not GATE.decide(nan, figures([0.1] * 200, (0.1, 0.1))).passed


def chance_of_error(win: float, lose: float, looks: int) -> float:
    """The exact chance that ``looks`` fair gambles, of ``win`` or ``-lose`` each, ever look better to a peeker.

    What the test says after n gambles depends on how many were won, so that the chance is a sum over all paths that
    have not passed yet. ``wins`` has the fewest wins with which the first side passes after each gamble.
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
def test_fair_gambles_look_better_with_a_chance_of_a_twentieth_at_most_however_often_one_looks(win, lose):
    chance = chance_of_error(win, lose, 1000)
    print(f"chance of error {chance:.4f}")
    assert 0.01 < chance <= ERROR


@pytest.mark.parametrize(("mean", "side"), [(0.25, "first"), (-0.25, "second")])
def test_a_clear_difference_is_seen_within_thirty_records(mean, side):
    looks = []
    for run in range(40):
        test, random = PairedTest(), np.random.default_rng(run)
        while test.better is None:
            test.add([mean + random.uniform(-0.2, 0.2)])
            looks.append(run)
        assert test.better == side
    assert np.median(np.bincount(looks)) <= 30


def test_certain_losses_are_survived_and_numbers_that_are_not_finite_make_nothing_clear():
    test = PairedTest()
    test.add([-1.0] * 5)
    assert test.better is None
    test.add([1.0] * 60)
    assert test.better == "first"
    test.add([float("nan"), *[0.5] * 100])
    assert test.better is None
