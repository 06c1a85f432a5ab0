"""8-bit linear layers of a GPU; torchao's weights also compute on a CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime import eight_bits
from osd.runtime.model import SlotModel
from tests.unit.runtime.rows import rows_of
from tests.unit.runtime.test_model import build, everything, prompt

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: pip install 'osd-llm[gpu]'"
)
KINDS = pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("fp8", 0.04)])


@needs_torchao
@KINDS
def test_narrowed_weight_has_one_byte_and_a_small_error(kind: str, error: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 48, dtype=torch.bfloat16), torch.randn(5, 48, dtype=torch.bfloat16)
    narrow: Any = eight_bits.narrowed(weight, kind)
    assert (narrow.qdata.itemsize, narrow.qdata.shape) == (1, weight.shape)
    goal, got = F.linear(x.float(), weight.float()), F.linear(x, narrow).float()
    assert 0 < float((got - goal).norm() / goal.norm()) < error
    rough = weight.float().mul(3).round().div(3)  # fewer bits exceed the bound
    assert float((F.linear(x.float(), rough) - goal).norm() / goal.norm()) > error


@needs_torchao
@KINDS
@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2", "gemma2"])
def test_narrow_model_has_a_small_divergence(family: str, kind: str, error: float) -> None:
    """Check each family; all but the last run in a decoder of ours, which combines weights."""
    rows, wanted = rows_of([(0, 0, prompt(12)), (1, 0, prompt(7, seed=2))]), everything(19)
    logp: list[Tensor] = []
    for weights in ("full", kind):
        model: Any = build(family)
        slots = SlotModel(model, slots=2, context=64, scratch=8, weights=weights, bucketed=True)
        logp.append(slots.forward(rows, wanted).logits.log_softmax(-1))
    goal, got = logp
    divergence = float((goal.exp() * (goal - got)).sum(-1).mean())
    print(f"KL {divergence:.2e} nats")
    assert 0 < divergence < error
    held = [value.numel() for name, value in model.named_parameters() if "q_proj.weight" in name]
    assert bool(sum(held)) == (family == "gemma2")  # combined weights are stored once


REFUSED = {
    ("int8", "cuda", "torchao"): r"target\.weights int8 on a GPU needs .* pip install 'osd-llm\[gpu\]'$",
    ("fp8", "cuda", "torchao"): r"target\.weights fp8 on a GPU needs .* pip install 'osd-llm\[gpu\]'$",
    ("fp8", "cpu", ""): "target\\.weights fp8 needs a GPU; a CPU has int8$",
    ("int8", "cpu", "kernels"): "target\\.weights int8 needs a GPU, or a CPU with AVX2",
}


@pytest.mark.parametrize(("weights", "device", "without"), REFUSED)
def test_check_names_the_missing_requirement(weights: str, device: str, without: str, monkeypatch: pytest.MonkeyPatch):
    if without == "torchao":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if without == "kernels":
        monkeypatch.setattr(eight_bits, "kernels", lambda: None)
    with pytest.raises(ValueError, match=REFUSED[weights, device, without]) as caught:
        eight_bits.check(weights, device == "cuda")
    assert "\n" not in str(caught.value)


def test_slot_model_on_cpu_refuses_fp8() -> None:
    with pytest.raises(ValueError, match="target\\.weights fp8 needs a GPU"):
        SlotModel(build("llama"), slots=1, context=16, scratch=1, weights="fp8")
