"""Rows of a forward, put together by hand."""

from __future__ import annotations

import torch

from osd.runtime.kv_cache import PackedRows


def rows_of(parts: list[tuple[int, int, list[int]]], trees: dict[int, list[int]] | None = None) -> PackedRows:
    """Rows of ``(slot, start, tokens)``; the last tokens of part i are a tree of parents ``trees[i]``, -1 the root."""
    tokens, slots, stores, positions, visible, base, masks = [], [], [], [], [], [], []
    width = max((len(parents) for parents in (trees or {}).values()), default=0)
    for index, (slot, start, ids) in enumerate(parts):
        parents = (trees or {}).get(index, [])
        chain = len(ids) - len(parents)
        paths: list[set[int]] = []
        for place, token in enumerate(ids):
            tokens.append(token)
            slots.append(slot)
            stores.append(start + place)
            mask = torch.zeros(width, dtype=torch.bool)
            if place < chain:
                positions.append(start + place)
                visible.append(start + place + 1)
                base.append(0)
            else:
                node = place - chain
                paths.append({node} | (paths[parents[node]] if parents[node] >= 0 else set()))
                mask[sorted(paths[node])] = True
                positions.append(start + chain + len(paths[node]) - 1)
                visible.append(start + chain)
                base.append(start + chain)
            masks.append(mask)
    narrow = [torch.tensor(values, dtype=torch.int32) for values in (slots, stores, visible, base)]
    return PackedRows(
        token_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slots=narrow[0],
        stores=narrow[1],
        visible=narrow[2],
        base=narrow[3] if width else None,
        mask=torch.stack(masks) if width else None,
    )
