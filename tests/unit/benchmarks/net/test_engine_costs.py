"""What is kept of an engine's cost model, on a tiny target."""

from __future__ import annotations

import numpy as np

from benchmarks.kept import Results
from benchmarks.net.engine_costs import costs_of_ways
from osd.simulation.step_costs import CostMeasurement, MeasuredStepCosts
from tests.unit.benchmarks.recorded import made_up


def test_costs_of_recall_a_drafter_and_both_can_be_simulated(experiment, tmp_path):
    recorded = experiment.recorded("tiny", experiment.setup.asked(made_up(4), 120))
    fresh = experiment.fresh("eagle")
    results = Results(tmp_path / "net", [])
    costs_of_ways(experiment.settings, experiment, fresh, recorded, 250.0, results)
    found = {kind: CostMeasurement.read(results.root / f"costs-{kind}.json") for kind in ("recall", "eagle", "mixed")}
    for kind, costs in found.items():
        assert costs.drafter == kind
        assert min(costs.table.forwards.values()) > 0
        assert costs.tokens_per_second == 250.0
        rounds = MeasuredStepCosts(costs, experiment.settings, 4).seconds(2, np.arange(5.0), 0)
        assert rounds.min() > 0
    assert found["recall"].hidden_width == 0
    assert found["eagle"].hidden_width == found["mixed"].hidden_width > 0
    assert found["eagle"].version_bytes > 0
    assert found["eagle"].table.proposals["eagle"]
