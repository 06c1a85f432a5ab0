"""In which precision training multiplies."""

from __future__ import annotations

import pytest
import torch

from osd.config import TrainerSettings
from osd.learning import optimizer
from osd.learning.batch import collate
from osd.learning.distiller import Distiller
from tests.unit.learning.toys import Toy, make_trace


@pytest.mark.parametrize(
    ("asked", "features", "read"),
    [
        ("auto", {"avx2": True}, torch.float32),
        ("auto", {"avx512_bf16": True}, torch.bfloat16),
        ("auto", {"amx_bf16": True}, torch.bfloat16),
        ("auto", {"bf16": True}, torch.bfloat16),
        ("float32", {"avx512_bf16": True}, torch.float32),
        ("bfloat16", {}, torch.bfloat16),
    ],
)
def test_products_are_bfloat16_where_the_cpu_multiplies_that_or_where_it_is_asked_for(
    monkeypatch, asked, features, read
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    layer = torch.nn.Linear(8, 8)
    with optimizer.products(asked, torch.device("cpu")):
        assert layer(torch.ones(2, 8)).dtype == read
    layer(torch.ones(2, 8)).sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_a_drafter_learns_in_either_precision_and_keeps_its_weights_in_float32():
    losses = {}
    for asked in ("float32", "bfloat16"):
        torch.manual_seed(0)
        settings = TrainerSettings(precision=asked, learning_rate=0.03, update_tokens=1)
        distiller = Distiller(Toy(), settings)
        batch = collate([make_trace("r", completion=30, seed=1, top_k=6)])
        losses[asked] = [distiller.step(batch).loss for _ in range(40)]
        assert losses[asked][-1] < 0.7 * losses[asked][0]
        assert all(weight.dtype == torch.float32 for weight in distiller.drafter.weights().values())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
