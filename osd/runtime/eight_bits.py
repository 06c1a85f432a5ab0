"""Linear layers of a GPU whose weights are held in 8 bits, as torchao holds and multiplies them.

Only weights are rounded, each output channel by a scale of its own; what they are multiplied with keeps its dtype.
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
    """Check that a model can have its linear layers' ``weights`` in this one of ``KINDS``, on a ``gpu`` or on a CPU.

    Raises:
        ValueError: it cannot; one sentence says what is missing.
    """
    if gpu:
        if importlib.util.find_spec("torchao") is None:
            missing = "needs a package that is not installed: pip install 'osd[gpu]'"
            raise ValueError(f"target.weights {weights} on a GPU {missing}")
    elif weights == "fp8":
        raise ValueError("target.weights fp8 needs a GPU; a CPU has int8")
    elif kernels() is None:
        raise ValueError("target.weights int8 needs a GPU, or a CPU with AVX2 and the kernels built for it: use full")


def narrowed(weight: Tensor, kind: str) -> Tensor:
    """A weight [out, in] in 8 bits, one of ``KINDS``: ``F.linear`` takes it in the place of the other."""
    torchao: Any = importlib.import_module("torchao.quantization")  # not there where there is no GPU
    config = {"int8": torchao.Int8WeightOnlyConfig, "fp8": torchao.Float8WeightOnlyConfig}[kind]
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    torchao.quantize_(layer, config(set_inductor_config=False))
    return layer.weight


def narrow(layers: Iterable[nn.Module], kind: str) -> None:
    """Hold the weights of those of ``layers`` that are ``nn.Linear`` in 8 bits; a table that a head shares stays."""
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(narrowed(layer.weight.detach(), kind), requires_grad=False)
