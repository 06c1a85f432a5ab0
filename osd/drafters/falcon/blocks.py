"""How the blocks of growing trees become rows of a Falcon drafter's forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.kv_cache import KVCache
from osd.speculation.tree import TreeBuilder

Node = int
"""A node of a tree, from 0 on, or -1 for the root; a block is named by the node that it follows."""


class BlockRows:
    """Collects committed pairs and the pairs of draft nodes into one ragged forward.

    Committed pairs go to the places behind the slot's length, and node i of a tree to the scratch place i behind them.
    The ``size`` rows of a block see each other and all that comes before it.
    """

    def __init__(self, builder: TreeBuilder, cache: KVCache, size: int) -> None:
        self.parents: list[list[Node]] = builder.parents.tolist()
        self._depths, self._tokens = builder.depths.tolist(), builder.tokens.tolist()
        self._cache, self._size = cache, size
        self._rows = RowBuilder()
        self._wanted: list[int] = []

    def begins(self, row: int, node: Node) -> bool:
        """Whether a block follows a node of tree ``row``, and is not one that it is in the middle of."""
        return node < 0 or self._depths[row][node] % self._size == 0

    def block_of(self, row: int, node: Node) -> tuple[Node, int]:
        """The block that says what follows a node, and at which of its places."""
        offset = 0 if node < 0 else self._depths[row][node] % self._size
        for _ in range(offset):
            node = self.parents[row][node]
        return node, offset

    def block_before(self, row: int, node: Node) -> Node:
        """The block that ends with a node."""
        return self.parents[row][self._path(row, node)[0]]

    def tokens_of(self, row: int, node: Node) -> list[int]:
        """The tokens of the block that ends with a node."""
        return [self._tokens[row][one] for one in self._path(row, node)]

    def committed(self, slot: int, tail: Tensor, states: Tensor) -> Tensor:
        """Append the pairs with ``states`` [m, hidden] behind those of a slot, and ask about the last block.

        Where that is longer, it begins with pairs that are there already: ``tail`` [k or fewer, hidden] are the last.

        Returns:
            The states [.., hidden] of all rows appended.
        """
        start = self._cache.length[slot]
        end = self._cache.length[slot] = start + len(states)
        first = max(0, end - self._size)
        if first > start:
            self._rows.tokens(slot, start, [0] * (first - start))
        row = self._rows.tokens(slot, first, [0] * (end - first), seen=end)
        self._wanted += [row + max(0, end - self._size + offset) - first for offset in range(self._size)]
        return torch.cat([tail[len(tail) - max(0, start - first) :], states])

    def drafted(self, slot: int, row: int, node: Node) -> None:
        """Append the pairs of the block that ends with a node of tree ``row``."""
        sees = paths(self.parents[row][: node + 1])
        for one in self._path(row, node):
            place = self._cache.length[slot]
            self._wanted.append(self._rows.node(slot, place, one, self._tokens[row][one], sees[one], sees[node]))

    @property
    def wanted(self) -> Tensor:
        """[blocks * size] the rows that were asked for, block by block."""
        return torch.tensor(self._wanted)

    def rows(self) -> PackedRows:
        """All rows, on the host."""
        return self._rows.build()

    def _path(self, row: int, node: Node) -> Sequence[Node]:
        """The nodes of the block that ends with a node."""
        found = [node]
        while len(found) < self._size:
            found.append(self.parents[row][found[-1]])
        return found[::-1]
