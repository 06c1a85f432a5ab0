"""Linear layers in 8 bits as a GPU has them: torchao's weights compute on a CPU, too."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime import eight_bits
from osd.runtime.batch import laid_out
from osd.runtime.generic import GenericDecoder
from osd.runtime.kv_cache import KVCache, heads_of
from osd.runtime.lean import LeanDecoder
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


def said(decoder: Any, cache: KVCache) -> Tensor:
    rows, wanted = laid_out(rows_of([(0, 0, prompt(12)), (1, 0, prompt(7, seed=2))]), everything(19), cache)
    with torch.inference_mode():
        return decoder.forward(rows, wanted, range(len(cache.keys)), None).logits


def cache_of(model: Any) -> KVCache:
    heads, dim = heads_of(model.config)
    return KVCache(model.config.num_hidden_layers, 2, heads, 64, dim, torch.float32, torch.device("cpu"))


def lean(model: Any, cache: KVCache, kind: str) -> LeanDecoder:
    return LeanDecoder(model, cache, (), kind)


def generic(model: Any, cache: KVCache, kind: str) -> GenericDecoder:
    if kind != "full":
        eight_bits.narrow(list(model.modules()), kind)
    return GenericDecoder(model, cache, ())


@needs_torchao
@KINDS
@pytest.mark.parametrize("made", [lean, generic])
@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2"])
def test_a_model_says_nearly_what_it_says_with_full_weights(
    family: str, made: Callable[[Any, KVCache, str], Any], kind: str, error: float
) -> None:
    full, narrow = build(family), build(family)
    caches = cache_of(full), cache_of(narrow)
    goal = said(made(full, caches[0], "full"), caches[0]).log_softmax(-1)
    got = said(made(narrow, caches[1], kind), caches[1]).log_softmax(-1)
    divergence = float((goal.exp() * (goal - got)).sum(-1).mean())
    print(f"KL {divergence:.2e} nats")
    assert 0 < divergence < error
    bytes_of = {name: value.numel() for name, value in narrow.named_parameters() if "q_proj.weight" in name}
    assert made is generic or not sum(bytes_of.values())  # what was put together is held once


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
        eight_bits.check(weights, torch.device(device))
    assert "\n" not in str(caught.value)


def test_a_model_on_a_cpu_refuses_what_its_device_lacks() -> None:
    with pytest.raises(ValueError, match="target\\.weights fp8 needs a GPU"):
        SlotModel(build("llama"), slots=1, context=16, scratch=1, weights="fp8")
