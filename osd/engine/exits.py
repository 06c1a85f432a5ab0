"""What drafters ran of a round's forward on the way to their drafts: verification goes on from there."""

from __future__ import annotations

from collections.abc import Sequence

from osd.drafters.session import Exits, Tree
from osd.runtime.kv_cache import KVCache
from osd.runtime.resumption import Begun
from osd.speculation.tree import ROOT


def begun_rows(exits: Exits, trees: Sequence[tuple[int, int, int, Tree]], cache: KVCache) -> Begun | None:
    """The rows of the forward that stand where a drafter left the target; None where there are none.

    A drafter knows its rows by the tokens that lead there: what it ran for a node that stands elsewhere in the tree
    that is verified, such as one of several sources, is moved to the places of that node.

    Args:
        exits: where the drafter left.
        trees: of each of its sequences the slot, the row and the place of the last committed token, and the tree that
            is verified behind it.
        cache: of the target.
    """
    rows: list[int] = []
    entries: list[int] = []
    for (slot, root, place, tree), known in zip(trees, exits.paths, strict=True):
        if () not in known:
            continue
        paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            paths[node] = (*paths[parent], token)
        found = {1 + node: known[path] for node, path in paths.items() if path in known}
        rows += [root + offset for offset in found]
        entries += found.values()
        source = {offset: exits.offsets[entry] for offset, entry in found.items()}
        moved = [offset for offset, before in source.items() if offset != before]
        if moved:
            layers = range(exits.layer)
            cache.move(slot, [place + source[offset] for offset in moved], [place + offset for offset in moved], layers)
    if not rows:
        return None
    if entries == list(range(len(exits.states))):
        return Begun(exits.layer, rows, exits.states, exits.hidden)
    return Begun(exits.layer, rows, exits.states[entries], None if exits.hidden is None else exits.hidden[entries])
