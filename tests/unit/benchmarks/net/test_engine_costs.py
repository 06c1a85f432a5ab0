"""Kept costs of an engine on a tiny target."""

from __future__ import annotations

import numpy as np

from benchmarks.net.engine_costs import costs_of_ways
from benchmarks.results import Results
from osd.simulation.step_costs import CostMeasurement, MeasuredStepCosts
from tests.unit.benchmarks.recorded import made_up


def test_costs_of_each_drafter_can_be_simulated(experiment, tmp_path):
    traces = experiment.record("tiny", experiment.setup.encode_prompts(made_up(4), 120))
    fresh = experiment.new_drafter("eagle")
    results = Results(tmp_path / "net", [])
    costs_of_ways(experiment.settings, experiment, fresh, traces, 250.0, results)
    costs_by_kind = {
        kind: CostMeasurement.read(results.root / f"costs-{kind}.json") for kind in ("recall", "eagle", "mixed")
    }
    for kind, costs in costs_by_kind.items():
        assert costs.drafter == kind
        assert min(costs.table.forwards.values()) > 0
        assert costs.tokens_per_second == 250.0
        rounds = MeasuredStepCosts(costs, experiment.settings, 4).seconds(2, np.arange(5.0), 0)
        assert rounds.min() > 0
    assert costs_by_kind["recall"].hidden_width == 0
    assert costs_by_kind["eagle"].hidden_width == costs_by_kind["mixed"].hidden_width > 0
    assert costs_by_kind["eagle"].version_bytes > 0
    assert costs_by_kind["eagle"].table.proposals["eagle"]
