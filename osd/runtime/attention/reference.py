"""Attention in plain PyTorch on any device, one sequence after another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from osd.runtime.attention.base import AttentionBackend
from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache


class ReferenceAttention(AttentionBackend):
    """Reference of the backends' tests, and the fallback where no other backend fits."""

    @staticmethod
    def fits(rows: PackedRows, cache: KVCache) -> bool:
        return rows.grid is None or rows.selection is not None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        rows, keys, values = self._rows, self._cache.keys[layer], self._cache.values[layer]
        selection = rows.selection if window is None else None
        slots, stores, start = rows.slots.long(), rows.stores.long(), self.first(window)
        self._cache.store(layer, slots, stores, key, value)
        _, heads, dim = query.shape
        kv_heads = key.shape[1]
        out = torch.empty_like(query)
        for slot in torch.unique(slots).tolist():
            group = (slots == slot).nonzero().squeeze(1)
            end = int(torch.maximum(rows.visible[group], rows.stores[group] + 1).max())
            if rows.mask is not None and rows.base is not None:
                end = min(max(end, int(rows.base[group].max()) + rows.mask.shape[1]), keys.shape[2])
            places = torch.arange(end, device=query.device)
            seen = (places >= start[group, None]) & (places < rows.visible[group, None])  # [r, end]
            if rows.mask is not None and rows.base is not None:
                offset = places - rows.base[group, None]
                inside = (offset >= 0) & (offset < rows.mask.shape[1])
                seen |= inside & rows.mask[group].gather(1, offset.clamp(0, rows.mask.shape[1] - 1).long())
            read = keys[slot, :, :end].float()
            if selection is not None:
                first = int(torch.minimum(rows.visible[group], rows.stores[group]).min())
                far = selection.far(layer, slot, first, query[group], rows.positions[group], keys[slot])
                if far is not None:
                    seen &= places >= far.begin
                    seen[:, far.places] = True
                    turned = selection.turned(read[:, far.places].transpose(0, 1), far.moved).transpose(0, 1)
                    read = read.index_copy(
                        1, far.places, turned.to(keys.dtype).float()
                    )  # rounded as the cached keys are
            # Query heads that share a key head become rows, so keys are never copied.
            q = query[group].float().unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3).flatten(1, 2)
            scores = torch.matmul(q, read.transpose(1, 2)) * scale  # [kv, g * r, end]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.unflatten(1, (heads // kv_heads, len(group))).masked_fill(~seen, -math.inf)
            mixed = torch.matmul(scores.softmax(-1).flatten(1, 2), values[slot, :, :end].float())
            mixed = mixed.unflatten(1, (heads // kv_heads, len(group))).permute(2, 0, 1, 3)  # [r, kv, g, dim]
            out[group] = mixed.reshape(len(group), heads, dim).to(out.dtype)
        return out
