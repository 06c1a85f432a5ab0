"""Sessions that hold weights of a version: how these are laid out, staged, and loaded between two decoding steps."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.drafting.acceptance_head import SessionHead
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import check
from osd.drafting.draft_vocabulary import check_maps, draft_ids
from osd.drafting.session import Runtime
from osd.drafting.shapes import LayerShape, rotate
from osd.runtime import attention
from osd.runtime.batch import PackedRows, laid_out, padded
from osd.runtime.device import aside, copied
from osd.runtime.kv_cache import KVCache
from osd.runtime.linear import PackedLinear, PlainLinear, fused_dtype, make_linear


class WeightedSession(AutoregressiveSession, ABC):
    """A session that drafts with tensors of a version, on its device and in its dtypes.

    ``LINEAR`` and ``VECTORS`` name the tensors that a kind has. A name is that of a tensor, or of a module whose weight
    is meant. Each of ``LINEAR`` becomes a layer of ``linear``; all dimensions of its tensor but the last are outputs.
    Each of ``VECTORS`` becomes a float32 tensor of ``vector``. A version with a draft vocabulary also has ``draft_ids``
    in ``vector``.

    ``load`` swaps what the session holds. Packed layers of our kernels, and the vectors beside them, are replaced by
    the staged tensors without a copy. Plain layers may be recorded in CUDA graphs: there every address stays, and the
    staged tensors are copied in.
    """

    LINEAR: ClassVar[tuple[str, ...]] = ()
    VECTORS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, weights: dict[str, Tensor], runtime: Runtime, target_head: Tensor | None = None) -> None:
        """Lay out ``weights``.

        Args:
            weights: of a version.
            runtime: where the session runs.
            target_head: [target vocabulary, hidden] on the host, for kinds whose layer "head" is the part of it for
                the draft vocabulary.
        """
        self.device = runtime.device
        self.bucketed = self.device.type == "cuda" if runtime.bucketed is None else runtime.bucketed
        self._expected, self._target_head = weights, target_head
        tensors = self.lay_out(weights)
        linear = {name: tensors.pop(name) for name in self.LINEAR}
        self.linear = {
            name: PlainLinear(value) if self.bucketed else make_linear(value, runtime.int8)
            for name, value in linear.items()
        }
        self.vector, self.head = tensors, SessionHead.of(weights, self.device)
        self.states = torch.empty(0)
        self._replaced: dict[str, Tensor] = {}  # by the last load; ``stage`` frees them, off the decode thread

    @property
    def support(self) -> Tensor | None:
        return self.vector.get("draft_ids")

    def lay_out(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a version in the dtypes and under the names that the session uses."""
        dtype, tensors = fused_dtype(self.device), dict[str, Tensor]()
        ids = draft_ids(weights["d2t"]).cpu() if "d2t" in weights else None
        for name in self.LINEAR:
            head = self._target_head if name == "head" else None
            value = _named(weights, name).flatten(0, -2) if head is None else head[ids]
            tensors[name] = value.to(self.device, dtype)
        for name in self.VECTORS:
            tensors[name] = _named(weights, name).to(self.device, torch.float32, copy=True)
        return tensors if ids is None else tensors | {"draft_ids": ids.to(self.device)}

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = check(weights, self._expected)
        check_maps(weights)
        self._replaced = {}
        with aside(self.device):
            staged = self.lay_out(weights) | super().stage(weights)
        return {
            name: self.linear[name].stage(value) if name in self.linear else value for name, value in staged.items()
        }

    def load(self, staged: dict[str, Tensor]) -> None:
        super().load(staged)
        places = {name: layer.place for name, layer in self.linear.items()} | self.vector
        packed = {name: layer for name, layer in self.linear.items() if isinstance(layer, PackedLinear)}
        if len(packed) < len(self.linear):
            copied(places.values(), [staged[name] for name in places])
            return
        self._replaced = places
        for name, layer in packed.items():
            layer.take(staged[name])
        self.vector = {name: staged[name] for name in self.vector}


def _named(weights: dict[str, Tensor], name: str) -> Tensor:
    """Return the tensor ``name``, or the weight of the module of that name."""
    return weights[name] if name in weights else weights[f"{name}.weight"]


class LayerSession(WeightedSession, ABC):
    """A session whose drafter has one attention layer, with the keys and values of its sequences in slots."""

    def __init__(
        self, shape: LayerShape, weights: dict[str, Tensor], runtime: Runtime, target_head: Tensor | None = None
    ) -> None:
        """See ``WeightedSession``; ``shape`` fixes the layer."""
        super().__init__(weights, runtime, target_head)
        places = runtime.context + runtime.scratch
        places = padded(places) if self.bucketed else places
        sizes = runtime.slots, shape.kv_heads, places, shape.head_dim
        self.cache = KVCache(1, *sizes, torch.float32, self.device)
        self._dim, self._eps = shape.head_dim, shape.eps
        cos, sin = shape.rotation(torch.arange(places, device=self.device))
        self.cos, self.sin = cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous()  # [places, head_dim]

    def packed(self, rows: PackedRows, wanted: Tensor) -> tuple[PackedRows, Tensor]:
        """Return rows on the host, and the places ``wanted`` [M] among them, as the layer computes them."""
        return laid_out(rows, wanted, self.cache) if self.bucketed else (rows, wanted)

    def attended(self, projected: Sequence[Tensor], rows: PackedRows) -> Tensor:
        """Return attention's output [R, heads * dim] of rows with the given queries, keys and values."""
        q, k, v = (part.unflatten(-1, (-1, self._dim)) for part in projected)
        cos, sin = self.cos[rows.positions].unsqueeze(1), self.sin[rows.positions].unsqueeze(1)
        q, k, backend = rotate(q, cos, sin), rotate(k, cos, sin), attention.prepare(rows, self.cache)
        return backend.attend(0, q, k, v, scale=self._dim**-0.5, window=None, softcap=0.0).flatten(-2)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Normalise ``x`` [..., width] by the vector ``name``."""
        return F.rms_norm(x, x.shape[-1:], self.vector[name], self._eps)
