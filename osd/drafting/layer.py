"""Base class of sessions whose drafter has one attention layer."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.session import Runtime
from osd.drafting.shapes import LayerShape, rotate
from osd.runtime import attention
from osd.runtime.batch import PackedRows, laid_out, padded_places
from osd.runtime.kv_cache import KVCache


class LayerSession(AutoregressiveSession, ABC):
    """Session of a drafter with one attention layer, whose keys and values are in slots."""

    def __init__(
        self, shape: LayerShape, weights: dict[str, Tensor], runtime: Runtime, target_head: Tensor | None = None
    ) -> None:
        """See ``AutoregressiveSession``; ``shape`` fixes the layer."""
        super().__init__(weights, runtime, target_head)
        places = runtime.context + runtime.scratch
        places = padded_places(places) if self.bucketed else places
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
