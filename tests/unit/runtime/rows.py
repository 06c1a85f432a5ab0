"""Rows of a forward for tests."""

from __future__ import annotations

from osd.runtime.batch import PackedRows, RowBuilder


def rows_of(parts: list[tuple[int, int, list[int]]], trees: dict[int, list[int]] | None = None) -> PackedRows:
    """Return rows of ``(slot, start, tokens)``; the last tokens of part i are a tree of parents ``trees[i]``, -1 the
    root.
    """
    builder = RowBuilder()
    for index, (slot, start, ids) in enumerate(parts):
        parents = (trees or {}).get(index, [])
        chain = len(ids) - len(parents)
        builder.tokens(slot, start, ids[:chain])
        builder.draft(slot, start + chain, ids[chain:], parents)
    return builder.build()
