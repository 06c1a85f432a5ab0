"""Linear layers of a GPU with 8-bit weights, stored and multiplied by torchao.

Only weights are rounded, with a scale for each output channel; activations keep their dtype.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from osd.runtime.native import kernels

KINDS = ("int8", "fp8")


def check(weights: str, gpu: bool) -> None:
    """Check that a model's linear layers can have ``weights``, one of ``KINDS``, on a GPU (``gpu``) or on a CPU.

    Raises:
        ValueError: they cannot; the message names the missing package or hardware.
    """
    if gpu:
        if importlib.util.find_spec("torchao") is None:
            missing = "needs a package that is not installed: pip install 'osd-llm[gpu]'"
            raise ValueError(f"target.weights {weights} on a GPU {missing}")
    elif weights == "fp8":
        raise ValueError("target.weights fp8 needs a GPU; a CPU has int8")
    elif kernels() is None:
        raise ValueError("target.weights int8 needs a GPU, or a CPU with AVX2 and the kernels built for it: use full")


def narrowed(weight: Tensor, kind: str) -> Tensor:
    """Return a weight [out, in] in 8 bits, of one of ``KINDS``, which ``F.linear`` accepts."""
    torchao: Any = importlib.import_module("torchao.quantization")  # optional, only for GPUs
    config = {"int8": torchao.Int8WeightOnlyConfig, "fp8": torchao.Float8WeightOnlyConfig}[kind]
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    torchao.quantize_(layer, config(set_inductor_config=False))
    return layer.weight


def narrow(layers: Iterable[nn.Module], kind: str) -> None:
    """Convert the weights of each ``nn.Linear`` to 8 bits; an embedding shared with a head does not change."""
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(narrowed(layer.weight.detach(), kind), requires_grad=False)
