"""The test that may be looked at after every pair."""

from __future__ import annotations

import numpy as np
import pytest

from osd.learning.sequential import _BETS, ERROR, PairedTest


def first_looks(draw, runs, looks):
    """In which look each run was clear, and which side it named; None where it never was."""
    found = []
    for run in range(runs):
        test, random = PairedTest(), np.random.default_rng(run)
        for look in range(1, looks + 1):
            test.add([draw(random)])
            if test.better is not None:
                found.append((look, test.better))
                break
        else:
            found.append(None)
    return found


def test_wealth_is_expected_to_stay_whatever_the_differences_are_if_their_mean_is_zero():
    # Every sequence of six fair differences of 1 and -1, and of two lopsided ones: the mean e-value is 1.
    for values, chances in (((1.0, -1.0), (0.5, 0.5)), ((0.9, -0.1), (0.1, 0.9))):
        total = 0.0
        for path in range(2**6):
            test, chance = PairedTest(), 1.0
            for place in range(6):
                side = path >> place & 1
                test.add([values[side]])
                chance *= chances[side]
            total += chance * np.exp(test._wealth[0]).mean()
        assert total == pytest.approx(1.0, abs=1e-9)


def test_sides_that_are_alike_are_told_apart_by_at_most_five_in_a_hundred_for_either_however_often_one_looks():
    found = first_looks(lambda random: random.choice([0.3, -0.3]), runs=200, looks=100)
    wrong = sum(one is not None and one[1] == "first" for one in found)
    print(f"{wrong} of 200 say that the first is better")
    assert wrong <= 200 * ERROR + 2 * (200 * ERROR * (1 - ERROR)) ** 0.5


@pytest.mark.parametrize(("mean", "side"), [(0.25, "first"), (-0.25, "second")])
def test_a_clear_difference_is_seen_within_thirty_records(mean, side):
    found = first_looks(lambda random: mean + random.uniform(-0.2, 0.2), runs=40, looks=60)
    assert all(one is not None and one[1] == side for one in found)
    assert np.median([one[0] for one in found if one]) <= 30


def test_figures_that_are_no_numbers_make_nothing_clear():
    test = PairedTest()
    test.add([0.5, float("nan"), *[0.5] * 100])
    assert test.better is None
    assert _BETS.max() < 1, "a bet of everything could be lost"
