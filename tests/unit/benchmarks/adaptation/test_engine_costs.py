"""What is kept of an engine's cost model, on a tiny target."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.adaptation.engine_costs import costs_of_ways, prompted
from osd.simulation.round_costs import Measured, MeasuredRounds
from osd.traffic.arrivals import Arrival
from tests.unit.benchmarks.adaptation.conftest import made_up, small_experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return small_experiment(tmp_path_factory.mktemp("home"))


def test_the_costs_of_recall_a_drafter_and_both_are_kept_and_can_be_simulated(experiment):
    recorded = experiment.recorded("tiny", experiment.setup.asked(made_up(4), 120))
    fresh = experiment.fresh("eagle")
    found = costs_of_ways(experiment.settings, experiment, fresh, recorded, 250.0, lambda step: None)
    assert set(found) == {"recall", "eagle", "mixed"}
    for kind, costs in found.items():
        assert costs.drafter == kind
        assert min(costs.table.forwards.values()) > 0
        assert costs.tokens_per_second == 250.0
        again = msgspec.json.decode(msgspec.json.encode(costs), type=Measured)
        assert again == costs
        rounds = MeasuredRounds(again, experiment.settings, 4).chains(2, 4)
        assert min(rounds) > 0
    assert found["recall"].hidden_width == 0
    assert found["eagle"].hidden_width == found["mixed"].hidden_width > 0
    assert found["eagle"].version_bytes > 0
    assert found["eagle"].table.proposals["eagle"]


def test_arrivals_have_the_tokens_of_the_prompts_that_they_bring(experiment):
    prompts = made_up(3)
    asked = experiment.setup.asked(prompts, 1000)
    found = prompted([Arrival(float(n), 5) for n in range(3)], prompts, experiment.setup.tokenizer)
    assert [one.prompt for one in found] == [len(one.prompt_ids) for one in asked]
    assert [one.tokens for one in found] == [5, 5, 5]
