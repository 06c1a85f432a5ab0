"""Linear layers for a few rows at a time, by the fastest kernel of this machine.

A decoding step multiplies 1 to about 64 rows with every weight, so reading the weights takes most of its time. Three
kernels are available: ours (``osd.runtime.native``; its results do not depend on the other rows), oneDNN with weights
packed once (fast where the CPU multiplies bfloat16), and PyTorch's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.runtime.eight_bits import narrowed
from osd.runtime.memory import Pages
from osd.runtime.native import DTYPES, WEIGHT_DTYPES, call_kernel, kernels, structs

CALIBRATION_ROWS = (1, 4, 8)

_LINE = 64  # bytes of a cache line


class PackedLinear(nn.Module):
    """``y = x W^T + b`` by our kernel, with the weight packed in panels. [..., in] -> [..., out].

    The weight is frozen. ``stage`` packs another weight, which is then copied to ``place`` or adopted by ``take``.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        """Pack ``weight`` [out, in] as ``dtype``: its own, or int8."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", pack(weight, dtype), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in the dtype of x: float32 or bfloat16."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        call_kernel(
            "osd_linear",
            "no memory for the scratch space of a linear layer",
            x.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            y.data_ptr(),
            x.numel() // self.in_features,
            self.in_features,
            self.out_features,
            DTYPES[x.dtype],
            WEIGHT_DTYPES[self.packed.dtype],
            torch.get_num_threads(),
        )
        return y

    def stage(self, weight: Tensor) -> Tensor:
        """Return a weight [out, in] packed like the current weight, for ``place`` or ``take``."""
        return pack(weight, self.packed.dtype)

    def take(self, staged: Tensor) -> None:
        """Use a staged weight itself instead of a copy; the address changes."""
        self.packed = staged

    @property
    def native(self) -> structs.Linear:
        """C struct of the layer for the kernels."""
        bias = None if self.bias is None else self.bias.data_ptr()
        code = WEIGHT_DTYPES[self.packed.dtype]
        return structs.Linear(self.packed.data_ptr(), bias, self.in_features, self.out_features, code)

    @property
    def place(self) -> Tensor:
        """Tensor that a staged weight is copied to."""
        return self.packed


class OneDnnLinear(nn.Module):
    """``y = x W^T + b`` by oneDNN, with the weight reordered once. [..., in] -> [..., out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = self.stage(weight)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; x has the weight's dtype."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @staticmethod
    def stage(weight: Tensor) -> Tensor:
        """Return another weight, reordered for ``load``."""
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), max(CALIBRATION_ROWS))

    def load(self, staged: Tensor) -> None:
        """Use a staged weight; oneDNN does not publish its layout, so it cannot be copied in place."""
        self.packed = staged


def gather(model: nn.Module) -> None:
    """Move the weights of a model's packed layers into one block of large pages.

    A forward reads every weight once and looks up each page first. With large pages, one core of a Zen 5 needs 6 to 9%
    less time for 1 to 14 rows of SmolLM2-135M.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if not layers:
        return
    sizes = [-(-layer.packed.nbytes // _LINE) * _LINE for layer in layers]
    room = Pages((sum(sizes),), torch.uint8, layers[0].packed.device).tensor
    for layer, part in zip(layers, room.split(sizes), strict=True):
        layer.take(part[: layer.packed.nbytes].view(layer.packed.dtype).copy_(layer.packed))


def pack(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack a weight [out, in] into panels of outputs, padded with zeros.

    ``dtype`` is the weight's own (None) or int8: 255 steps for each output channel, with 127 as its largest element.
    """
    library = kernels()
    assert library is not None  # noqa: S101
    weight = weight.detach().contiguous()
    outputs, inputs = weight.shape
    dtype = dtype or weight.dtype
    code = WEIGHT_DTYPES[dtype]
    packed = Pages((library.osd_packed_bytes(outputs, inputs, code) // dtype.itemsize,), dtype, weight.device).tensor
    library.osd_pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs, DTYPES[weight.dtype], code)
    return packed


class PlainLinear(nn.Module):
    """``y = x W^T + b`` by PyTorch in the weight's dtype, on any device. [..., in] -> [..., out]."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in the dtype of x."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)

    @staticmethod
    def stage(weight: Tensor) -> Tensor:
        """Return another weight unchanged."""
        return weight

    @property
    def place(self) -> Tensor:
        """Tensor that a staged weight is copied to."""
        return self.weight


class Stacked:
    """Several linear layers of one input as one: [..., in] -> [..., sum of outs], in the dtype of the weights."""

    def __init__(self, layers: Sequence[nn.Linear | PlainLinear]) -> None:
        """Make the weights of ``layers`` views of one tensor, so that values copied into them are used here."""
        self._layers = layers
        self.sizes = [len(layer.weight) for layer in layers]
        self._weight = torch.cat([layer.weight.data for layer in layers])
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        at = 0
        for layer, size in zip(layers, self.sizes, strict=True):
            layer.weight.data = self._weight[at : at + size]
            if layer.bias is not None and self._bias is not None:
                layer.bias.data = self._bias[at : at + size]
            at += size

    def narrow(self, kind: str) -> None:
        """Convert the weights to 8 bits, see ``osd.runtime.eight_bits``; the single layers become empty."""
        self._weight = narrowed(self._weight, kind)
        for layer in self._layers:
            layer.weight.data = layer.weight.new_empty(0, layer.weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias)


LinearMaker = Callable[[Tensor, Tensor | None], nn.Module]
_MAKERS: dict[str, LinearMaker] = {"native": PackedLinear, "onednn": OneDnnLinear, "torch": PlainLinear}


def fused_dtype(device: torch.device) -> torch.dtype:
    """Return the weight dtype with which ``make_linear`` multiplies float32 rows on ``device``."""
    return torch.bfloat16 if device.type != "cpu" or kernels() is not None else torch.float32


def make_linear(weight: Tensor, int8: bool = False) -> PackedLinear | PlainLinear:
    """Return a layer for float32 rows with a weight of ``fused_dtype`` that can be replaced in place.

    With ``int8`` it has 8-bit weights if our kernels multiply it.
    """
    packs = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return PackedLinear(weight, dtype=torch.int8 if int8 else None) if packs else PlainLinear(weight)


def _onednn_available(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def fastest(outputs: int, inputs: int, dtype: torch.dtype) -> str:
    """Return the name of the fastest kernel here for a layer of this shape, measured once.

    The measure is the summed median time of 1, 4 and 8 rows over four layers in turn, so that weights come from memory
    as they do in a model.
    """
    names = ["torch"]
    if kernels() is not None:
        names.append("native")
    if _onednn_available(dtype):
        names.append("onednn")
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(4)]
    cost = {}
    for name in names:
        layers = [_MAKERS[name](weight, None) for weight in weights]
        cost[name] = sum(_median_seconds(layers, torch.randn(rows, inputs).to(dtype)) for rows in CALIBRATION_ROWS)
    return min(cost, key=cost.__getitem__)


def _median_seconds(layers: list[nn.Module], x: Tensor) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(6):
            start = time.perf_counter()
            for layer in layers:
                layer(x)
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def quantise(model: nn.Module) -> None:
    """Replace every frozen ``nn.Linear`` of a CPU model in place by one with int8 weights of our kernels."""
    with torch.inference_mode():
        for parent, name, child in _frozen_layers(model):
            setattr(parent, name, PackedLinear(child.weight, child.bias, torch.int8))
        gather(model)


def accelerate(model: nn.Module, kernel: str | None = None) -> None:
    """Replace every frozen ``nn.Linear`` of a CPU model in place by ``kernel``, or by the fastest for its shape."""
    with torch.inference_mode():
        for parent, name, child in _frozen_layers(model):
            chosen = kernel or fastest(child.out_features, child.in_features, child.weight.dtype)
            if chosen != "torch":  # the model has PyTorch's layer already
                setattr(parent, name, _MAKERS[chosen](child.weight, child.bias))
        gather(model)


def _frozen_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers that our kernels can compute, each with its parent and its name there."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype in DTYPES:
                yield module, name, child
