"""How growing trees become rows of a model that says several tokens in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from osd.drafters.rows import BlockRows, Node
from osd.runtime.batch import paths
from osd.runtime.kv_cache import KVCache
from osd.speculation.tree import TreeBuilder


class PromptRows(BlockRows):
    """Collects committed tokens and paths of trees, each with inputs behind it that are no tokens, into one forward.

    Committed tokens go to the places behind the slot's length, and node i of a tree to the scratch place i behind them.
    The inputs, ``size - 1`` of them with the ids from ``first`` on, go to places that no node has yet: only their own
    call sees them.
    """

    def __init__(
        self, builder: TreeBuilder, cache: KVCache, size: int, first: int, own_ids: np.ndarray | None = None
    ) -> None:
        """Rows of a model for whose tokens the target's are ``own_ids`` [target vocabulary], None for the same."""
        super().__init__(builder, cache, size)
        self._own_ids = own_ids
        self._inputs = [first + number for number in range(size - 1)]
        self._free = Counter(dict(enumerate(builder.sizes.tolist())))  # by tree, the first place without a node

    def text(self, slot: int, tokens: Sequence[int]) -> None:
        """Append committed tokens, and ask about what follows the last."""
        start = self._cache.length[slot]
        end = self._cache.length[slot] = start + len(tokens)
        row = self._rows.tokens(slot, start, [*tokens, *self._inputs])
        self._wanted += range(row + end - start - 1, row + end - start - 1 + self._size)

    def node(self, slot: int, row: int, node: Node, there: set[Node]) -> None:
        """Append what is not ``there`` yet of the path to a node of tree ``row``, and ask about what follows it."""
        start, sees = self._cache.length[slot], paths(self.parents[row][: node + 1])
        for one in self._missing(row, node, there):
            token = self._tokens[row][one]
            token = token if self._own_ids is None else int(self._own_ids[token])
            self._rows.node(slot, start, one, token, sees[one])
            there.add(one)
        self._wanted.append(len(self._rows) - 1)
        path = sees[node]
        for token in self._inputs:
            place = self._free[row]
            self._free[row] += 1
            path |= 1 << place
            self._wanted.append(self._rows.node(slot, start, place, token, path))

    def _missing(self, row: int, node: Node, there: set[Node]) -> list[Node]:
        """The last nodes of a path that nobody has read, the first of them first; ``node`` is among them."""
        found: list[Node] = []
        while node >= 0 and node not in there:
            found.append(node)
            node = self.parents[row][node]
        return found[::-1]
