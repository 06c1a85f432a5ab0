"""How the blocks of growing trees become rows of a Falcon drafter's forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osd.drafters.rows import BlockRows, Node
from osd.runtime.batch import paths


class FalconRows(BlockRows):
    """Collects committed pairs and the pairs of draft nodes into one ragged forward.

    Committed pairs go to the places behind the slot's length, and node i of a tree to the scratch place i behind them.
    The ``size`` rows of a block see each other and all that comes before it.
    """

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

    def _path(self, row: int, node: Node) -> Sequence[Node]:
        """The nodes of the block that ends with a node."""
        found = [node]
        while len(found) < self._size:
            found.append(self.parents[row][found[-1]])
        return found[::-1]
