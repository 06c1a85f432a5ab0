"""Attention by our CPU kernels, with results that do not depend on the other rows of a forward."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from osd.runtime.attention.base import AttentionBackend
from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache
from osd.runtime.native import DTYPES, call_kernel, kernels


class NativeAttention(AttentionBackend):
    """Attention by the kernel of ``attention.c``, which the C decoders also run inside their layers."""

    @staticmethod
    def fits(rows: PackedRows, cache: KVCache) -> bool:
        keys = cache.keys
        fitting = keys.device.type == "cpu" and keys.shape[-1] % 8 == 0 and keys.dtype in DTYPES
        return fitting and rows.grid is None and kernels() is not None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        rows = self._rows
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        count, heads, dim = query.shape
        out = torch.empty_like(query)
        # The kernel gets addresses without sizes, so wrong shapes would corrupt memory.
        if key.shape != value.shape or key.shape != (count, keys.shape[1], keys.shape[3]) or dim != keys.shape[3]:
            shapes = ", ".join(str(list(part.shape[1:])) for part in (query, key, value))
            raise ValueError(
                f"queries, keys and values of {shapes} do not fit slots of {[keys.shape[1], keys.shape[3]]}"
            )
        if key.dtype != query.dtype or value.dtype != query.dtype:
            raise ValueError(f"keys in {key.dtype} and values in {value.dtype} for queries in {query.dtype}")
        selection = rows.selection if window is None else None  # a sliding window reads few places
        call_kernel(
            "osd_attention", "no memory for the scratch space of attention",
            query.data_ptr(), key.data_ptr(), value.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            count, heads, key.shape[1], dim, keys.shape[2],
            rows.slots.data_ptr(), rows.stores.data_ptr(), self.first(window).data_ptr(), rows.visible.data_ptr(),
            None if rows.base is None else rows.base.data_ptr(),
            None if rows.mask is None else rows.mask.data_ptr(),
            0 if rows.mask is None else rows.mask.shape[1],
            scale, softcap, DTYPES[query.dtype], DTYPES[keys.dtype], torch.get_num_threads(),
            rows.positions.data_ptr(), None if selection is None else ctypes.byref(selection.native), layer,
        )  # fmt: skip
        return out
