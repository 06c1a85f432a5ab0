"""Draft curves: nodes and lengths by threshold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from osd.simulation.draft_curve import THRESHOLDS, chain_length, draft_curve, uniform_acceptance


@pytest.mark.parametrize("certainty", [0.3, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("hundredths", [5, 30, 60, 90])
def test_whole_drafts_have_the_length_of_mean_chains(hundredths, certainty):
    curve = draft_curve(hundredths, 6, certainty)
    assert curve.lengths[-1] == pytest.approx(chain_length(hundredths / 100, 6), rel=0.03)
    assert curve.nodes[-1] == 6
    assert (curve.nodes[0], curve.lengths[0], curve.surplus[0]) == (0, 1, 0)


def test_higher_threshold_drafts_less_and_accepts_more():
    curve = draft_curve(60, 6, 1.0)
    assert (np.diff(curve.nodes) > 0).all()
    rate = (curve.lengths[1:] - 1) / curve.nodes[1:]
    assert (np.diff(rate) < 0).all()
    assert (rate >= THRESHOLDS[1:]).all()


def test_alternatives_add_tokens_above_the_threshold():
    alone, both = draft_curve(60, 6, 1.0), draft_curve(60, 6, 1.0, 0.5)
    unsure = THRESHOLDS < 1 / 8  # the largest probability of an alternative
    nodes, lengths = both.nodes - alone.nodes, both.lengths - alone.lengths
    assert (nodes[unsure] > 0).all()
    assert (lengths[unsure] / nodes[unsure] >= THRESHOLDS[unsure]).all()
    assert not nodes[~unsure].any()
    assert (both.lengths[0], both.nodes[0], both.surplus[0]) == (1, 0, 0)
    # A token with probability .6 has an alternative with the probability .5 * .6 * .4.
    assert draft_curve(60, 1, 1e6, 0.5).lengths[-1] == pytest.approx(1 + 0.6 + 0.5 * 0.6 * 0.4, rel=1e-3)


@pytest.mark.parametrize("second", [0.0, 0.5])
def test_better_drafter_gives_more_at_each_threshold(second):
    curves = [draft_curve(hundredths, 6, 1.0, second) for hundredths in range(5, 100, 5)]
    for worse, better in itertools.pairwise(curves):
        assert (better.lengths >= worse.lengths).all()


def test_surplus_of_the_last_step_equals_renewal_theory():
    curve, chance = draft_curve(70, 4, 100.0), np.random.default_rng(1)
    # Draws of the tokens per step; nearly all tokens have an acceptance probability of .7.
    draws = chance.random((20_000, 4)) < 0.7
    tokens = 1 + np.cumprod(draws, 1).sum(1)
    ends = tokens.cumsum()
    goals = np.arange(100, ends[-1] - 10, 37)
    over = ends[np.searchsorted(ends, goals)] - goals
    print(f"beyond the end {over.mean():.3f}, by renewal theory {curve.surplus[-1]:.3f}")
    assert curve.surplus[-1] == pytest.approx(over.mean(), abs=0.05)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_uniform_acceptance_inverts_chain_length(acceptance):
    assert uniform_acceptance(chain_length(acceptance, 5), 5) == pytest.approx(acceptance, abs=1e-6)
