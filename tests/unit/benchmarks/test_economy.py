"""``osd bench economy``: the measured speed-up of an engine and passes of the same prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine.economy import EconomySession, Passes, table
from osd.economy.switchback import Switchback
from osd.engine.request import SamplingParams
from tests.unit.engine.harness import prompts, running

SESSION = EconomySession(
    offline=0.50, offline_error=0.01, measured=0.52, width=0.02, trials=30, price=0.004, price_error=0.002, seconds=60.0
)


@pytest.mark.parametrize(("measured", "agrees"), [(0.52, True), (0.475, True), (0.53, False), (0.46, False)])
def test_session_agrees_if_the_interval_contains_zero(measured: float, agrees: bool):
    assert replace(SESSION, measured=measured).agrees is agrees


def test_table_prints_speedups_and_the_price():
    row, few_trials = table([SESSION, replace(SESSION, width=math.inf)]).rows
    assert row[1:4] == ("1.649 ±0.020", "1.682 ±0.020", "30")
    assert "+0.40%" in row[6]
    assert (row[5], few_trials[5]) == ("yes", "no interval")


def test_session_measures_passes_and_trials(tiny_target: Path):
    with running(tiny_target, "eagle", governed=True) as client:
        passes = Passes(
            client.engine, [tuple(prompt) for prompt in prompts((5, 9, 12, 7))], streams=2, rounds=2, tokens=60,
            sampling=SamplingParams(temperature=0), switchback=Switchback(0.05, 0.05, seed=0),
        )  # fmt: skip
        passes.warm_up(slots=3)
        assert client.engine.counters().finished.total() == 3
        result = passes.session(turns=8, first=0)
        assert passes.switchback.measured.trials == result.trials
    assert result.trials > 1
    assert result.seconds > 0
    assert result.offline_error > 0
