"""Which rounds the time goes into."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from osd.engine.round_mix import WINDOW_SECONDS, RoundMix
from osd.speculation.cost_model import CostModel

COSTS = CostModel({1: 0.010, 2: 0.011, 4: 0.013, 8: 0.017, 16: 0.025})


def a_round(*domains, prompts=0):
    """Of sequences that draft with the drafters of ``domains``, None for one without."""
    drafters = [None if name is None else SimpleNamespace(domain=name, kind="eagle") for name in domains]
    sequences = [SimpleNamespace(sequence=SimpleNamespace(drafter=drafter)) for drafter in drafters]
    return SimpleNamespace(sequences=sequences, plain_rows=len(domains) + prompts)


def shares(mix, now):
    found = mix.shares(now, COSTS, 3)
    return {(domain, one.streams, one.prompts): one.share for domain, all_ in found.items() for one in all_}


def test_a_round_belongs_to_the_domains_of_its_sequences_and_to_none_where_nobody_may_draft():
    mix = RoundMix(0.0)
    for _ in range(100):
        mix.observe(a_round("a", "a", "b", None), 0.02)
        mix.observe(a_round("a", prompts=35), 0.01)
    found = shares(mix, 10.0)
    assert found == pytest.approx({("a", 4, 0): 0.1, ("b", 4, 0): 0.05, ("a", 1, 32): 0.1}, rel=0.02)


def test_what_was_long_ago_counts_less_and_is_forgotten_in_the_end():
    mix = RoundMix(0.0)
    for second in range(1, 301):
        mix.observe(a_round("a"), 1.0)
        first = shares(mix, float(second))
    assert first["a", 1, 0] == pytest.approx(1.0, rel=0.01)
    assert shares(mix, 300 + WINDOW_SECONDS)["a", 1, 0] == pytest.approx(0.27, abs=0.02)
    assert shares(mix, 300 + 20 * WINDOW_SECONDS) == {}


def test_each_kind_says_what_its_rounds_cost_with_chains_of_each_length():
    costs = CostModel({1: 0.010, 2: 0.011, 4: 0.013, 8: 0.017, 16: 0.025})
    costs.observe_proposal("eagle", 2, 2, 0.004)
    mix = RoundMix(0.0)
    mix.observe(a_round("a", "a", prompts=4), 0.1)
    (one,) = mix.shares(1.0, costs, 2)["a"]
    assert one.seconds == pytest.approx((0.015, 0.017 + 0.002, 0.019 + 0.004))
