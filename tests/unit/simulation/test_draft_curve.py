"""What drafts give whose tokens are more or less probable."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from osd.simulation.draft_curve import THRESHOLDS, alike, chain_length, draft_curve


@pytest.mark.parametrize("certainty", [0.3, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("hundredths", [5, 30, 60, 90])
def test_drafts_of_everything_are_as_long_as_chains_of_their_mean(hundredths, certainty):
    curve = draft_curve(hundredths, 6, certainty)
    assert curve.lengths[-1] == pytest.approx(chain_length(hundredths / 100, 6), rel=0.03)
    assert curve.nodes[-1] == 6
    assert (curve.nodes[0], curve.lengths[0], curve.surplus[0]) == (0, 1, 0)


def test_the_surer_a_token_has_to_be_the_fewer_are_drafted_and_the_more_of_them_accepted():
    curve = draft_curve(60, 6, 1.0)
    assert (np.diff(curve.nodes) > 0).all()
    rate = (curve.lengths[1:] - 1) / curve.nodes[1:]
    assert (np.diff(rate) < 0).all()
    assert (rate >= THRESHOLDS[1:]).all()


def test_second_choices_add_tokens_at_every_threshold_and_each_asks_for_the_same_chance():
    alone, both = draft_curve(60, 6, 1.0), draft_curve(60, 6, 1.0, 0.5)
    unsure = THRESHOLDS < 1 / 8  # a second choice is right with no more
    nodes, lengths = both.nodes - alone.nodes, both.lengths - alone.lengths
    assert (nodes[unsure] > 0).all()
    assert (lengths[unsure] / nodes[unsure] >= THRESHOLDS[unsure]).all()
    assert not nodes[~unsure].any()
    assert (both.lengths[0], both.nodes[0], both.surplus[0]) == (1, 0, 0)
    # Of one token that is right with a chance of .6 the second is with half of .6 times .4.
    assert draft_curve(60, 1, 1e6, 0.5).lengths[-1] == pytest.approx(1 + 0.6 + 0.5 * 0.6 * 0.4, rel=1e-3)


@pytest.mark.parametrize("second", [0.0, 0.5])
def test_a_better_drafter_gives_more_at_every_threshold(second):
    curves = [draft_curve(hundredths, 6, 1.0, second) for hundredths in range(5, 100, 5)]
    for worse, better in itertools.pairwise(curves):
        assert (better.lengths >= worse.lengths).all()


def test_what_the_last_round_gives_too_much_is_what_renewal_theory_says():
    curve, chance = draft_curve(70, 4, 100.0), np.random.default_rng(1)
    # Nearly every token is accepted with a chance of .7: tokens of a round, drawn.
    draws = chance.random((20_000, 4)) < 0.7
    tokens = 1 + np.cumprod(draws, 1).sum(1)
    ends = tokens.cumsum()
    goals = np.arange(100, ends[-1] - 10, 37)
    over = ends[np.searchsorted(ends, goals)] - goals
    print(f"beyond the end {over.mean():.3f}, by renewal theory {curve.surplus[-1]:.3f}")
    assert curve.surplus[-1] == pytest.approx(over.mean(), abs=0.05)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_an_acceptance_is_found_again_by_the_length_of_its_chains(acceptance):
    assert alike(chain_length(acceptance, 5), 5) == pytest.approx(acceptance, abs=1e-6)
