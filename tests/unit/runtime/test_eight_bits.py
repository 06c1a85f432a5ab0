"""Linear layers in 8 bits as a GPU has them: torchao's weights compute on a CPU, too."""

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
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: pip install 'osd[gpu]'"
)
KINDS = pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("fp8", 0.04)])


@needs_torchao
@KINDS
def test_a_weight_takes_a_byte_a_number_and_multiplies_nearly_as_before(kind: str, error: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 48, dtype=torch.bfloat16), torch.randn(5, 48, dtype=torch.bfloat16)
    mine: Any = eight_bits.narrowed(weight, kind)
    assert (mine.qdata.itemsize, mine.qdata.shape) == (1, weight.shape)
    goal, got = F.linear(x.float(), weight.float()), F.linear(x, mine).float()
    assert 0 < float((got - goal).norm() / goal.norm()) < error
    rough = weight.float().mul(3).round().div(3)  # fewer bits do not keep the bound
    assert float((F.linear(x.float(), rough) - goal).norm() / goal.norm()) > error


@needs_torchao
@KINDS
@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2", "gemma2"])
def test_a_model_says_nearly_what_it_says_with_full_weights(family: str, kind: str, error: float) -> None:
    """Of these, all but the last run in a decoder of ours, which puts weights together."""
    rows, wanted = rows_of([(0, 0, prompt(12)), (1, 0, prompt(7, seed=2))]), everything(19)
    said: list[Tensor] = []
    for weights in ("full", kind):
        model: Any = build(family)
        slots = SlotModel(model, slots=2, context=64, scratch=8, weights=weights, bucketed=True)
        said.append(slots.forward(rows, wanted).logits.log_softmax(-1))
    goal, got = said
    divergence = float((goal.exp() * (goal - got)).sum(-1).mean())
    print(f"KL {divergence:.2e} nats")
    assert 0 < divergence < error
    held = [value.numel() for name, value in model.named_parameters() if "q_proj.weight" in name]
    assert bool(sum(held)) == (family == "gemma2")  # what was put together is held once


REFUSED = {
    ("int8", "cuda", "torchao"): r"target\.weights int8 on a GPU needs .* pip install 'osd\[gpu\]'$",
    ("fp8", "cuda", "torchao"): r"target\.weights fp8 on a GPU needs .* pip install 'osd\[gpu\]'$",
    ("fp8", "cpu", ""): "target\\.weights fp8 needs a GPU; a CPU has int8$",
    ("int8", "cpu", "kernels"): "target\\.weights int8 needs a GPU, or a CPU with AVX2",
}


@pytest.mark.parametrize(("weights", "device", "without"), REFUSED)
def test_what_a_device_lacks_is_told_in_one_sentence(
    weights: str, device: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without == "torchao":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if without == "kernels":
        monkeypatch.setattr(eight_bits, "kernels", lambda: None)
    with pytest.raises(ValueError, match=REFUSED[weights, device, without]) as caught:
        eight_bits.check(weights, device == "cuda")
    assert "\n" not in str(caught.value)


def test_a_model_on_a_cpu_refuses_what_its_device_lacks() -> None:
    with pytest.raises(ValueError, match="target\\.weights fp8 needs a GPU"):
        SlotModel(build("llama"), slots=1, context=16, scratch=1, weights="fp8")
