"""How the nodes of growing trees become rows of a drafter's forward."""

from __future__ import annotations

import torch
from torch import Tensor

from osd.runtime.kv_cache import KVCache, PackedRows
from osd.speculation.tree import TreeBuilder, ancestors


class TreeRows:
    """Collects committed tokens and tree nodes of several slots into one ragged forward.

    Committed tokens go to the places behind the slot's length; node i of a tree goes to the scratch
    place i behind them and sees the committed places, its ancestors and itself.
    """

    def __init__(self, builder: TreeBuilder, cache: KVCache) -> None:
        self.builder, self.cache = builder, cache
        self._depths = builder.depths.tolist()
        self._slots: list[int] = []
        self._stores: list[int] = []
        self._positions: list[int] = []
        self._visible: list[int] = []
        self._base: list[int] = []
        self._trees: list[tuple[int, int, int]] = []  # (row of this forward, tree, node)
        self._last: list[int] = []

    def commit(self, slot: int, count: int) -> None:
        """Append ``count`` committed tokens; the last of them is asked for what follows."""
        start = self.cache.length[slot]
        for place in range(start, start + count):
            self._add(slot, place, place, place + 1, 0)
        self.cache.length[slot] = start + count
        self._last.append(len(self._slots) - 1)

    def node(self, slot: int, tree: int, node: int) -> None:
        """Append a node of ``tree``."""
        base, depth = self.cache.length[slot], self._depths[tree][node]
        if depth == node + 1:  # every earlier node is an ancestor
            self._add(slot, base + node, base + node, base + node + 1, base)
        else:
            self._trees.append((len(self._slots), tree, node))
            self._add(slot, base + node, base + depth - 1, base, base)
        self._last.append(len(self._slots) - 1)

    def _add(self, slot: int, store: int, position: int, visible: int, base: int) -> None:
        self._slots.append(slot)
        self._stores.append(store)
        self._positions.append(position)
        self._visible.append(visible)
        self._base.append(base)

    @property
    def last(self) -> Tensor:
        """[M] the rows that were asked for, in order."""
        return torch.tensor(self._last)

    def rows(self, tokens: Tensor) -> PackedRows:
        """All rows with their tokens [R], on the host."""
        narrow = torch.tensor([self._slots, self._stores, self._visible, self._base], dtype=torch.int32)
        mask = None
        if self._trees:
            at, tree, node = torch.tensor(self._trees).T
            mask = torch.zeros(len(self._slots), self.builder.capacity, dtype=torch.bool)
            mask[at] = ancestors(self.builder.parents.cpu(), self.builder.sizes.cpu())[tree, node]
        return PackedRows(
            token_ids=tokens,
            positions=torch.tensor(self._positions),
            slots=narrow[0],
            stores=narrow[1],
            visible=narrow[2],
            base=narrow[3] if mask is not None else None,
            mask=mask,
        )
