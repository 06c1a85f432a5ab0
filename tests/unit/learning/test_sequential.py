"""The test that may be looked at after every pair."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from osd.learning.gate import ERROR, PairedTest


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
