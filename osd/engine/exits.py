"""What drafters ran of a round's forward on the way to their drafts: verification goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from osd.drafting.session import Exits, Tree
from osd.runtime.kv_cache import KVCache
from osd.runtime.resumption import Begun
from osd.verification.tree import ROOT


def begun_rows(exits: Sequence[Exits], trees: Sequence[tuple[int, int, int, Tree]], cache: KVCache) -> list[Begun]:
    """The rows of the forward that stand where a drafter left the target, those of each layer together.

    A drafter knows its rows by the tokens that lead there: what it ran for a node that stands elsewhere in the tree
    that is verified, such as one of several sources, is moved to the places of that node.

    ``trees`` are, of each of its sequences, the slot, the row and the place of the last committed token, and the tree
    that is verified behind it. ``cache`` is the target's.
    """
    exits = sorted(exits, key=lambda one: one.layer)
    rows: list[list[int]] = [[] for _ in exits]
    entries: list[list[int]] = [[] for _ in exits]
    for number, (slot, root, place, tree) in enumerate(trees):
        found = [_offsets(tree, one.paths[number]) for one in exits]
        for mine, entry, one in zip(rows, entries, found, strict=True):
            mine += [root + offset for offset in one]
            entry += one.values()
        _move(slot, place, exits, found, cache)
    return [
        Begun(one.layer, mine, _taken(one.states, entry), None if one.hidden is None else _taken(one.hidden, entry))
        for one, mine, entry in zip(exits, rows, entries, strict=True)
        if mine
    ]


def _taken(rows: Tensor, entries: list[int]) -> Tensor:
    """Some rows, without a copy where they are all of them in their order, as they mostly are."""
    return rows if entries == list(range(len(rows))) else rows[entries]


def _offsets(tree: Tree, known: Mapping[tuple[int, ...], int]) -> dict[int, int]:
    """Which of the ``known`` rows stands at which place behind the last committed token."""
    if not known:
        return {}
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        paths[node] = (*paths[parent], token)
    return {1 + node: known[path] for node, path in paths.items() if path in known}


def _move(slot: int, place: int, exits: Sequence[Exits], found: Sequence[dict[int, int]], cache: KVCache) -> None:
    """Have the keys of all rows at their places; ``exits`` come by their layers, the first ones first.

    In each layer those of all rows that ran through it move at once: one may go where another has been.
    """
    done = 0
    for number, one in enumerate(exits):
        moved = [
            (place + other.offsets[entry], place + offset)
            for other, mine in zip(exits[number:], found[number:], strict=True)
            for offset, entry in mine.items()
            if other.offsets[entry] != offset
        ]
        if moved:
            before, after = zip(*moved, strict=True)
            cache.move(slot, [*before], [*after], done, one.layer)
        done = one.layer
