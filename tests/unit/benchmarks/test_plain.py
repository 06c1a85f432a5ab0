from __future__ import annotations

import pytest

from benchmarks.plain import Pair, measure, ratios
from tests.tiny import make_tiny
from tests.unit.engine.harness import prompts, running


def test_each_turn_times_the_three_ways_on_real_models(tmp_path):
    directory = make_tiny(tmp_path)
    with running(directory, slots=8) as client:
        pairs = measure(client.engine, directory, [tuple(prompt) for prompt in prompts([5, 9])], 6, 2)
        counters = client.engine.counters()
    assert len(pairs) == 2
    assert min(min(pair.one, pair.transformers, pair.eight) for pair in pairs) > 0
    assert counters.requests == 3 * (1 + 8)
    assert counters.completion_tokens == 6 * counters.requests


def test_ratios_are_taken_within_a_turn():
    found = ratios([Pair(20, 10, 80), Pair(30, 10, 90), Pair(50, 10, 300)])
    assert found["one stream, times transformers"] == (3, 2, 5)
    assert found["eight streams, times one"] == (pytest.approx(4), 3, 6)
