from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.governor import GOVERNED, PLAIN, Load, Speed, measure
from benchmarks.report import speeds
from tests.tiny import make_tiny
from tests.unit.engine.harness import prompts, running


def test_every_way_decodes_the_same_requests_alone_and_together(tmp_path):
    load = Load(depths=(1, 3), alone=2, together=4, tokens=6, cycles=2)
    asked = [tuple(prompt) for prompt in prompts([5, 9, 3])]
    steps: list[str] = []
    with running(make_tiny(tmp_path), "eagle", governed=True) as client:
        found = measure(client.engine, asked, load, steps.append)
        counters = client.engine.counters()
    assert [speed.way for speed in found] == [PLAIN, GOVERNED, "depth 1", "depth 3"]
    for speed in found:
        assert len(speed.alone) == len(speed.together) == len(speed.stream) == 2
        assert min(speed.alone + speed.together + speed.stream) > 0
    assert counters.requests == 4 * 3 * 6  # ways, cycles with the one to warm up, requests
    assert counters.completion_tokens == counters.requests * 6
    assert counters.speculation().drafted > 0
    assert len(steps) == 3


def test_ratios_are_taken_within_a_cycle_and_shown_with_their_spread():
    plain = Speed(PLAIN, [10.0, 20.0, 40.0], [5.0, 5.0, 5.0], [8.0, 8.0, 8.0])
    mine = Speed(GOVERNED, [20.0, 30.0, 40.0], [5.0, 4.0, 6.0], [8.0, 8.0, 16.0])
    assert mine.times(plain) == [(1.5, 1.0, 2.0), (1.0, pytest.approx(0.8), pytest.approx(1.2)), (1.0, 1.0, 2.0)]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(speeds([plain, mine]))
    text = console.export_text()
    assert "1.500 (1.00 to 2.00)" in text
    assert "1.000 (0.80 to 1.20)" in text
