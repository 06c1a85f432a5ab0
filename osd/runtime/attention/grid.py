"""Attention over a grid of sequences, with shapes that depend only on sizes known to the host.

Ragged rows are arranged in cells [B, W], a line for each sequence. The sequences' slots are read up to a common length,
and masks hide the places that a row does not see. With sizes rounded up to a few buckets, one CUDA graph serves many
forwards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from osd.runtime.attention.base import AttentionBackend
from osd.runtime.batch import Grid, PackedRows
from osd.runtime.kv_cache import KVCache

_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # they support masks, also in a CUDA graph


class GridAttention(AttentionBackend):
    """PyTorch's attention over the padded grid of rows on a device, without reading values back to the host."""

    def __init__(self, rows: PackedRows, cache: KVCache) -> None:
        super().__init__(rows, cache)
        assert rows.grid is not None  # noqa: S101  ``fits`` has checked it
        self._grid: Grid = rows.grid
        self._biases: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    @staticmethod
    def fits(rows: PackedRows, cache: KVCache) -> bool:
        return rows.grid is not None and rows.selection is None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        rows, grid, keys, values = self._rows, self._grid, self._cache.keys[layer], self._cache.values[layer]
        self._cache.store(layer, rows.slots, rows.stores, key, value)
        heads, kv_heads = query.shape[1], key.shape[1]
        groups, (count, width) = heads // kv_heads, grid.cells.shape
        # Query heads that share a key head become rows, so keys are never copied for them.
        q = query.to(keys.dtype)[grid.cells].unflatten(2, (kv_heads, groups))  # [B, W, kv, g, dim]
        q = q.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, groups * width, -1)
        # All slots, or a single one, are read in place; a subset is gathered first.
        in_place = grid.all_slots or len(keys) == 1
        read_keys, read_values = (
            cache[:, :, : grid.context] if in_place else cache[:, :, : grid.context][grid.owners]
            for cache in (keys, values)
        )
        bias = self._bias(window, groups, keys.dtype)
        if softcap:
            scores = torch.matmul(q.float(), read_keys.float().transpose(2, 3)) * scale
            mixed = (softcap * torch.tanh(scores / softcap) + bias).softmax(-1) @ read_values.float()
        else:
            with sdpa_kernel(_KERNELS):
                mixed = F.scaled_dot_product_attention(q, read_keys, read_values, attn_mask=bias, scale=scale)
        mixed = mixed.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4)  # [B, W, kv, g, dim]
        return mixed.reshape(count * width, heads, -1)[grid.where].to(query.dtype)

    def _bias(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Return the bias of the scores: 0 where a row sees a place, else a large negative number.

        The shape is [B, 1, g * W, context]. The number is finite, because block-wise kernels may fail on a block of
        minus infinities.
        """
        if (window, groups, dtype) not in self._biases:
            rows = self._rows
            places = torch.arange(self._grid.context, device=rows.visible.device)
            hidden = places >= rows.visible[:, None]  # [R, context]
            if window is not None:
                hidden |= places <= rows.positions[:, None] - window
            if rows.mask is not None and rows.base is not None:
                offset = places - rows.base[:, None]
                last = rows.mask.shape[1] - 1
                hidden &= (offset < 0) | (offset > last) | ~rows.mask.gather(1, offset.clamp(0, last))
            bias = hidden.to(dtype) * (torch.finfo(dtype).min / 2)
            self._biases[window, groups, dtype] = bias[self._grid.cells].repeat(1, groups, 1).unsqueeze(1)
        return self._biases[window, groups, dtype]
