from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.plain import Pair, measure, ratios
from benchmarks.streams import decoding_rate
from tests.tiny import make_tiny
from tests.unit.engine.harness import prompts, running


def test_each_turn_times_the_three_ways_on_real_models(tmp_path):
    directory = make_tiny(tmp_path)
    with running(directory, slots=8) as client:
        pairs = measure(client.engine, directory, [tuple(prompt) for prompt in prompts([5, 9])], 6, 2)
        counters = client.engine.counters()
    assert len(pairs) == 2
    assert min(min(astuple(pair)) for pair in pairs) > 0
    assert counters.requests == 3 * (1 + 8)
    assert counters.completion_tokens == 6 * counters.requests


def test_ratios_are_taken_within_a_turn():
    found = ratios([Pair(20, 10, 80, 30, 150), Pair(30, 10, 90, 40, 160), Pair(50, 10, 300, 50, 300)])
    assert found["one stream, times transformers"] == (3, 2, 5)
    assert found["eight streams, times one"] == (pytest.approx(4), 3, 6)
    assert found["eight streams, times one, while all decode"] == (5, 4, 6)


def test_the_rate_of_decoding_counts_only_what_came_while_all_streams_decoded():
    early, late = [(1.0, 1), (2.0, 1), (4.0, 2)], [(2.0, 1), (3.0, 3), (5.0, 1)]
    assert decoding_rate({"early": early, "late": late}) == (2 + 3) / 2
    assert decoding_rate({"early": early}) == (1 + 2) / 3
    assert decoding_rate({"early": [(1.0, 1)], "late": late}) == 0, "they never decoded together"
