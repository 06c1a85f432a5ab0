"""Tree-ready attention over KV slots, registered with transformers.

Any decoder-only model that calls its attention through ``AttentionInterface`` and hands on unknown
keyword arguments can run on it: rows, slots and masks arrive as the keyword ``osd_step``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from osd.runtime.kv_cache import KVCache, PackedRows
from osd.runtime.native import DTYPES, kernels

NAME = "osd_slots"


@dataclass(frozen=True)
class Step:
    """What one forward hands to every attention layer."""

    rows: PackedRows
    cache: KVCache


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    osd_step: Step | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend [1, heads, R, dim] queries over their slots; transformers' attention signature.

    Returns:
        [1, R, heads, dim] and no attention weights.

    Raises:
        NotImplementedError: the model wants attention sinks, which the slots do not have.
    """
    if osd_step is None:
        raise NotImplementedError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("models with attention sinks are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rows, cache = osd_step.rows, osd_step.cache
    # [1, heads, R, dim] -> [R, heads, dim]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    keys, values = cache.keys[layer], cache.values[layer]
    out = attend(query, key, value, keys, values, rows, window=sliding_window, scale=scale, softcap=softcap or 0.0)
    return out.unsqueeze(0), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Store the new keys and values in their slots and attend, on the best kernel for the device.

    query [R, heads, dim]; key, value [R, kv_heads, dim]; keys, values [slots, kv_heads, places, dim], all of
    one dtype; ``window`` is how many places a row sees, itself included, None for all. Returns [R, heads, dim].
    """
    if rows.grid is not None:
        return rows.grid.attend(query, key, value, keys, values, rows, window, scale, softcap)
    if window is None:
        start = torch.zeros_like(rows.visible)
    else:
        start = (rows.positions.to(torch.int32) - (window - 1)).clamp_min(0)
    native = query.device.type == "cpu" and query.shape[-1] % 8 == 0 and query.dtype in DTYPES
    run = _native if native and kernels() is not None else reference
    return run(query.contiguous(), key.contiguous(), value.contiguous(), keys, values, rows, start, scale, softcap)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    start: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    """``attend`` in plain PyTorch: sequence by sequence, with query heads folded into rows."""
    slots, stores = rows.slots.long(), rows.stores.long()
    keys[slots, :, stores] = key.to(keys.dtype)
    values[slots, :, stores] = value.to(values.dtype)
    _, heads, dim = query.shape
    kv_heads = key.shape[1]
    out = torch.empty_like(query)
    for slot in torch.unique(slots).tolist():
        mine = (slots == slot).nonzero().squeeze(1)
        end = int(torch.maximum(rows.visible[mine], rows.stores[mine] + 1).max())
        if rows.mask is not None and rows.base is not None:
            end = min(max(end, int(rows.base[mine].max()) + rows.mask.shape[1]), keys.shape[2])
        places = torch.arange(end, device=query.device)
        seen = (places >= start[mine, None]) & (places < rows.visible[mine, None])  # [r, end]
        if rows.mask is not None and rows.base is not None:
            offset = places - rows.base[mine, None]
            inside = (offset >= 0) & (offset < rows.mask.shape[1])
            seen |= inside & rows.mask[mine].gather(1, offset.clamp(0, rows.mask.shape[1] - 1).long())
        # Query heads that share a key head become rows, so keys are never copied.
        q = query[mine].float().unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.matmul(q, keys[slot, :, :end].float().transpose(1, 2)) * scale  # [kv, g * r, end]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.unflatten(1, (heads // kv_heads, len(mine))).masked_fill(~seen, -math.inf)
        mixed = torch.matmul(scores.softmax(-1).flatten(1, 2), values[slot, :, :end].float())
        mixed = mixed.unflatten(1, (heads // kv_heads, len(mine))).permute(2, 0, 1, 3).reshape(len(mine), heads, dim)
        out[mine] = mixed.to(out.dtype)
    return out


def _native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    start: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    library = kernels()
    assert library is not None  # noqa: S101
    out = torch.empty_like(query)
    tree = rows.mask is not None and rows.base is not None
    count, heads, dim = query.shape
    failed = library.osd_attention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        count, heads, key.shape[1], dim, keys.shape[2],
        rows.slots.data_ptr(), rows.stores.data_ptr(), start.data_ptr(), rows.visible.data_ptr(),
        rows.base.data_ptr() if tree else None, rows.mask.data_ptr() if tree else None,  # type: ignore[union-attr]
        rows.mask.shape[1] if tree else 0,  # type: ignore[union-attr]
        scale, softcap, DTYPES[query.dtype], DTYPES[keys.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for attention's scratch space")
    return out


AttentionInterface.register(NAME, slot_attention)
