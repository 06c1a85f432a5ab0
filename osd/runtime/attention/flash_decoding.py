"""Flash-Decoding over slots: several programs share the places of each sequence (Dao et al., 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from osd.runtime.attention.base import AttentionBackend
from osd.runtime.batch import PackedRows, power_of_two
from osd.runtime.gpu import has_kernels, launch
from osd.runtime.kv_cache import KVCache

_PROGRAMS = 256
"""Programs to run at once, about two for each multiprocessor of a large GPU."""

_SPLITS = 32
"""Most parts that the places of a sequence are divided into."""

_LINES = (16, 64)
"""Least and most lines (rows times heads with a common key head) of one program."""


class FlashDecoding(AttentionBackend):
    """Triton attention that reads keys in place and supports tree masks.

    PyTorch's kernels support masks too, but use only one multiprocessor for each sequence and head.
    """

    @staticmethod
    def fits(rows: PackedRows, cache: KVCache) -> bool:
        dim = cache.keys.shape[-1]
        laid_out = rows.grid is not None and rows.selection is None
        return laid_out and has_kernels(cache.keys.device) and dim in (16, 32, 64, 128, 256)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        rows, grid, keys, values = self._rows, self._rows.grid, self._cache.keys[layer], self._cache.values[layer]
        assert grid is not None  # noqa: S101  ``fits`` has checked it
        count, heads, dim = query.shape
        kv_heads, of_slot, of_head = key.shape[1], keys.stride(0), keys.stride(1)
        query, key, value = (_contiguous_heads(part) for part in (query, key, value))
        new = (key, value, key.stride(0), value.stride(0), keys, values, rows.slots, rows.stores, of_slot, of_head, dim)
        launch("store", (count, kv_heads), *new, num_warps=1)
        lines, width = grid.cells.shape
        groups = heads // kv_heads
        tile = min(max(power_of_two(width * groups), _LINES[0]), _LINES[1])
        block = 64 if dim * keys.itemsize <= 256 else 32  # places that fit a multiprocessor's memory
        tiles, pairs = -(-width * groups // tile), lines * kv_heads
        splits = max(min(_PROGRAMS // (tiles * pairs), -(-grid.context // block), _SPLITS), 1)
        tops, totals = torch.empty(2, splits, count, heads, device=query.device)
        sums = torch.empty(splits, count, heads, dim, device=query.device)
        base = mask = rows.visible
        nodes = 0
        if rows.base is not None and rows.mask is not None:
            base, mask, nodes = rows.base, rows.mask.view(torch.uint8), rows.mask.shape[1]
        launch(
            "attend", (tiles, pairs, splits),
            query, query.stride(0), keys, values, of_slot, of_head, self._cache.places,
            grid.cells, grid.where, grid.owners, rows.visible, rows.positions, base, mask, sums, tops, totals,
            scale, softcap, window or 0, splits, count, width, nodes,
            kv_heads, groups, dim, nodes > 0, window is not None, bool(softcap), tile, block,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        result = torch.empty(count, heads, dim, dtype=query.dtype, device=query.device)
        parts = (sums, tops, totals, grid.cells, grid.where, result, splits, count)
        launch("combine", (count, heads), *parts, heads, dim, _SPLITS, num_warps=1)
        return result


def _contiguous_heads(part: Tensor) -> Tensor:
    """Return [R, heads, dim] with contiguous heads in each row."""
    return part if part.stride(1) == part.shape[2] and part.stride(2) == 1 else part.contiguous()
