"""Rows of a decoding step that a drafter has run through the first layers of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from osd.drafting.session import Exits, Tree
from osd.runtime.kv_cache import KVCache
from osd.runtime.resumption import ResumedRows
from osd.verification.tree import ROOT


def resumed_rows(
    exits: Sequence[Exits], trees: Sequence[tuple[int, int, int, Tree]], cache: KVCache
) -> list[ResumedRows]:
    """Return the rows of the forward that resume behind an exit, grouped by layer.

    A drafter knows its rows by the tokens on their path. The verified tree may have such a path at another node, for
    example if it joins the drafts of several sources. Then the keys of the row move to the place of that node.

    Args:
        exits: rows that a drafter ran, for each of its exit layers.
        trees: for each sequence of the drafter: slot, row and place of the last committed token, and the tree that is
            verified after it.
        cache: of the target.
    """
    exits = sorted(exits, key=lambda group: group.layer)
    rows: list[list[int]] = [[] for _ in exits]
    entries: list[list[int]] = [[] for _ in exits]
    for number, (slot, root, place, tree) in enumerate(trees):
        entry_by_offset = [_entry_by_offset(tree, group.paths[number]) for group in exits]
        for group_rows, group_entries, known in zip(rows, entries, entry_by_offset, strict=True):
            group_rows += [root + offset for offset in known]
            group_entries += known.values()
        _move_keys(slot, place, exits, entry_by_offset, cache)
    return [
        ResumedRows(
            group.layer,
            group_rows,
            _select(group.states, chosen),
            None if group.hidden is None else _select(group.hidden, chosen),
        )
        for group, group_rows, chosen in zip(exits, rows, entries, strict=True)
        if group_rows
    ]


def _select(rows: Tensor, entries: list[int]) -> Tensor:
    """Return rows by their numbers, without a copy in the usual case: all rows in order."""
    return rows if entries == list(range(len(rows))) else rows[entries]


def _entry_by_offset(tree: Tree, known: Mapping[tuple[int, ...], int]) -> dict[int, int]:
    """Map offsets from the last committed token to the entries of ``known``, which has entries by path."""
    if not known:
        return {}
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        paths[node] = (*paths[parent], token)
    return {1 + node: known[path] for node, path in paths.items() if path in known}


def _move_keys(
    slot: int, place: int, exits: Sequence[Exits], entry_by_offset: Sequence[dict[int, int]], cache: KVCache
) -> None:
    """Move the keys of all rows to their places; ``exits`` are sorted by layer.

    Each layer moves the rows that ran through it in one call, because a row may move to the former place of another.
    """
    done = 0
    for number, group in enumerate(exits):
        moved = [
            (place + later.offsets[entry], place + offset)
            for later, known in zip(exits[number:], entry_by_offset[number:], strict=True)
            for offset, entry in known.items()
            if later.offsets[entry] != offset
        ]
        if moved:
            before, after = zip(*moved, strict=True)
            cache.move(slot, [*before], [*after], done, group.layer)
        done = group.layer
