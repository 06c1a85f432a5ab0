"""How the nodes of growing trees become rows of a drafter's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.device import lists
from osd.runtime.kv_cache import KVCache
from osd.verification.tree import TreeBuilder


class TreeRows:
    """Collects committed tokens and tree nodes of several slots into one ragged forward.

    Committed tokens go to the places behind the slot's length; node i of a tree goes to the scratch place i behind them
    and sees the committed places, its ancestors and itself. ``parents`` are those of each tree's nodes.
    """

    def __init__(
        self,
        builder: TreeBuilder,
        cache: KVCache,
        own_ids: np.ndarray | None = None,
        asked: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Rows of a model for whose tokens the target's are ``own_ids`` [target vocabulary], None for the same.

        With ``asked``, rows [M] and nodes [M], the attribute of that name has them as lists.
        """
        self.parents: list[list[int]]
        self.parents, self._tokens, *self.asked = lists([builder.parents, builder.tokens, *(asked or ())])
        self._cache, self._own_ids = cache, own_ids
        self._rows = RowBuilder()
        self._paths: list[list[int]] = [[] for _ in self.parents]
        self._last: list[int] = []

    def __len__(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Append committed tokens; the last of them is asked for what follows."""
        start = self._cache.length[slot]
        self._rows.tokens(slot, start, tokens)
        self._cache.length[slot] = start + len(tokens)
        self._last.append(len(self._rows) - 1)

    def node(self, slot: int, tree: int, node: int) -> None:
        """Append a node of ``tree``."""
        known = self._paths[tree]
        known += paths(self.parents[tree][len(known) : node + 1], known)
        token = self._tokens[tree][node]
        token = token if self._own_ids is None else int(self._own_ids[token])
        self._last.append(self._rows.node(slot, self._cache.length[slot], node, token, known[node]))

    @property
    def last(self) -> Tensor:
        """[M] the rows that were asked for, in order."""
        return torch.tensor(self._last)

    def rows(self) -> PackedRows:
        """All rows, on the host."""
        return self._rows.build()


Node = int
"""A node of a tree, from 0 on, or -1 for the root; a block is named by the node that it follows."""


def path_to(parents: Sequence[Node], node: Node) -> list[Node]:
    """Return the nodes that lead to ``node``, itself the last; none for the root."""
    path: list[Node] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True)
class Block:
    """What one call proposes: ``logits`` [size, draft vocabulary], and the ``states`` [size, hidden] they come from."""

    logits: Tensor
    states: Tensor


class BlockRows:
    """Rows of a drafter that proposes ``size`` tokens of a path in one call.

    The root and every ``size``-th node of a path take a call, which proposes for all of the next ``size`` levels.
    """

    def __init__(self, builder: TreeBuilder, cache: KVCache, size: int) -> None:
        self.parents: list[list[Node]] = builder.parents.tolist()
        self._depths, self._tokens = builder.depths.tolist(), builder.tokens.tolist()
        self._cache, self._size = cache, size
        self._rows = RowBuilder()
        self._wanted: list[int] = []

    def begins(self, row: int, node: Node) -> bool:
        """Whether what follows a node of tree ``row`` takes a call of its own."""
        return node < 0 or self._depths[row][node] % self._size == 0

    def block_of(self, row: int, node: Node) -> tuple[Node, int]:
        """Return the block that proposes what follows a node, and at which of its places."""
        offset = 0 if node < 0 else self._depths[row][node] % self._size
        for _ in range(offset):
            node = self.parents[row][node]
        return node, offset

    def answers(
        self, asked: Sequence[tuple[int, int, Node]], blocks: Mapping[int, Mapping[Node, Block]]
    ) -> tuple[list[Tensor], Tensor]:
        """Return what ``blocks``, by slot and node, say of nodes given as slot, tree and node.

        Returns:
            Logits [draft vocabulary] behind each, and the states [M, hidden] that their own tokens were drawn from. A
            root was not drawn: its state is 0.
        """
        logits: list[Tensor] = []
        states: list[Tensor] = []
        for slot, row, node in asked:
            block, offset = self.block_of(row, node)
            logits.append(blocks[slot][block].logits[offset])
            if node < 0:
                states.append(torch.zeros_like(blocks[slot][block].states[0]))
            else:
                block, offset = self.block_of(row, self.parents[row][node])
                states.append(blocks[slot][block].states[offset])
        return logits, torch.stack(states)

    @property
    def wanted(self) -> Tensor:
        """[calls * size] the rows that were asked for, call by call."""
        return torch.tensor(self._wanted)

    def rows(self) -> PackedRows:
        """All rows, on the host."""
        return self._rows.build()
