"""Step costs: from a stored cost model, or from a roofline with known results."""

from __future__ import annotations

import numpy as np
import pytest

from osd.config import PublishedCosts
from osd.economy.costs import CostModel
from osd.engine.planner import prompt_chunk
from osd.simulation.step_costs import (
    MODELS,
    CostMeasurement,
    CostsError,
    MeasuredStepCosts,
    PublishedStepCosts,
    make_step_costs,
)
from tests.unit.simulation.toys import scenario, settings


def model() -> CostModel:
    costs = CostModel({1: 0.010, 8: 0.012, 64: 0.040})
    costs.observe_host(4, 0.002)
    costs.observe_plain_host(4, 0.001)
    for nodes in (1, 3):
        costs.observe_proposal("eagle", 2, nodes, 0.003 * nodes)
    return costs


def measured(**changed) -> CostMeasurement:
    kept = {
        "machine": "a CPU", "drafter": "eagle", "cores": 2, "hidden_width": 1728, "version_bytes": 1e7,
        "tokens_per_second": 250.0, "table": model().table(),
    }  # fmt: skip
    return CostMeasurement(**(kept | changed))


def test_cost_model_is_equal_after_a_file(tmp_path):
    file = tmp_path / "costs.json"
    measured().write(file)
    was, now = model(), CostModel.of(CostMeasurement.read(file).table)
    for rows in (1, 3, 8, 20, 64, 100):
        assert now.step(rows) == pytest.approx(was.step(rows))
        assert now.plain_step(rows) == pytest.approx(was.plain_step(rows))
    for sequences, nodes in ((1, 1), (2, 2), (5, 3)):
        assert now.proposal("eagle", sequences, nodes) == was.proposal("eagle", sequences, nodes) > 0


def test_measured_step_costs_equal_the_cost_model():
    costs, known = MeasuredStepCosts(measured(), settings(), depth=3), model()
    seconds = costs.seconds(2, np.array([0.0, 1.0, 3.0]), 0)
    drafts = [known.step(2 * (1 + nodes)) + known.proposal("eagle", 2, nodes) for nodes in (1, 3)]
    assert seconds == pytest.approx([known.plain_step(2), *drafts])
    assert costs.seconds(2, np.array([1.0]), 10)[0] == pytest.approx(known.step(14) + known.proposal("eagle", 2, 1))
    assert costs.chunk(0, 3, 64) == 64
    assert costs.chunk(4, 1, 32) == prompt_chunk(known.steps(36), 4, 1, 32)


def test_gpu_step_is_the_longer_of_reads_and_operations():
    published = PublishedCosts(gpu="a100", model="llama-3.1-8b", efficiency=0.5, host_ms=0, context=1000)
    costs = PublishedStepCosts(published, settings())
    plain = np.zeros(1)
    weights, kv = 8.03e9 * 2, 1000 * 2 * 32 * 8 * 128 * 2
    assert costs.seconds(1, plain, 0)[0] == pytest.approx((weights + kv) / (0.5 * 2.039e12))
    assert costs.seconds(8, plain, 0)[0] == pytest.approx((weights + 8 * kv) / (0.5 * 2.039e12))
    assert costs.seconds(8, plain, 4000)[0] == pytest.approx(2 * 8.03e9 * 4008 / (0.5 * 312e12))
    # The drafter is called for each token of the longest draft.
    step = costs.seconds(1, np.array([1.0]), 0)[0] - costs.seconds(1, plain, 0)[0]
    assert step == pytest.approx(costs.version_bytes / (0.5 * 2.039e12))
    assert costs.seconds(1, np.array([3.0]), 0)[0] - costs.seconds(1, plain, 0)[0] == pytest.approx(3 * step)


def test_eagle_3_head_of_an_8b_model_has_its_real_size():
    shape = MODELS["llama-3.1-8b"]
    assert 2 * shape.hidden_width == 24_576
    q_k_v_o = 8192 * 4096 + 2 * 8192 * 1024 + 4096 * 4096
    assert shape.drafter(32_000) == q_k_v_o + 3 * 4096 * 14336 + 3 * 4096 * 4096 + 32_000 * 4096
    assert shape.kv_bytes == 131_072


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"table": {"forwards": {}}}'])
def test_file_without_costs_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "costs.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CostsError, match=r"costs\.json") as caught:
        make_step_costs(settings(), scenario(costs={"kind": "measured", "file": file}))
    assert "\n" not in str(caught.value)


def test_costs_without_forwards_are_refused(tmp_path):
    file = tmp_path / "costs.json"
    measured(table=CostModel().table()).write(file)
    with pytest.raises(CostsError, match="empty"):
        CostMeasurement.read(file)
