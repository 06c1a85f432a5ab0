"""Rows of a drafter's forward: committed tokens and nodes of growing trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from osd.runtime.batch import PackedRows, RowBuilder, paths
from osd.runtime.device import to_lists
from osd.runtime.kv_cache import KVCache
from osd.verification.tree import TreeBuilder

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
    """Answer of one call: ``logits`` [size, draft vocabulary], and the ``states`` [size, hidden] behind them."""

    logits: Tensor
    states: Tensor


class TreeRows:
    """Rows of several slots in one ragged forward.

    Committed tokens go to the places behind the slot's length. Node i of a tree goes to the scratch place i behind them
    and sees the committed places, its ancestors and itself. The root and every ``size``-th node of a path take a call,
    which answers for the next ``size`` levels. ``parents`` are those of each tree's nodes.
    """

    def __init__(
        self,
        builder: TreeBuilder,
        cache: KVCache,
        asked: tuple[Tensor, Tensor] | None = None,
        size: int = 1,
        own_ids: np.ndarray | None = None,
    ) -> None:
        """Make no rows yet.

        Args:
            builder: the trees.
            cache: the drafter's.
            asked: rows [M] and nodes [M] to expand; the attribute of that name has them as lists.
            size: tokens of a call.
            own_ids: [target vocabulary] the model's own token for each of the target's, None for the same.
        """
        parts = [builder.parents, builder.tokens, builder.depths, *(asked or ())]
        self.parents: list[list[Node]]
        self.parents, self._tokens, self._depths, *self.asked = to_lists(parts)
        self._cache, self._size, self._own_ids = cache, size, own_ids
        self._rows = RowBuilder()
        self._paths: list[list[int]] = [[] for _ in self.parents]
        self._wanted: list[int] = []

    def __len__(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def sees(self, tree: int, node: Node) -> int:
        """Return the places of a node and its ancestors, as in ``osd.runtime.batch.paths``."""
        known = self._paths[tree]
        known += paths(self.parents[tree][len(known) : node + 1], known)
        return known[node]

    def add(self, slot: int, tree: int, node: Node, seen: Node | None = None) -> int:
        """Append a node of ``tree``, which sees the path to ``seen``, by default its own; returns its row."""
        token = self._tokens[tree][node]
        token = token if self._own_ids is None else int(self._own_ids[token])
        own = self.sees(tree, node)
        further = () if seen is None else (self.sees(tree, seen),)
        return self._rows.node(slot, self._cache.length[slot], node, token, own, *further)

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Append committed tokens, and ask for the answer behind the last of them."""
        start = self._cache.length[slot]
        self._rows.tokens(slot, start, tokens)
        self._cache.length[slot] = start + len(tokens)
        self._wanted.append(len(self._rows) - 1)

    def node(self, slot: int, tree: int, node: Node) -> None:
        """Append a node of ``tree``, and ask for the answer behind it."""
        self._wanted.append(self.add(slot, tree, node))

    def begins(self, tree: int, node: Node) -> bool:
        """Whether a node takes a call of its own."""
        return node < 0 or self._depths[tree][node] % self._size == 0

    def answers(
        self, asked: Sequence[tuple[int, int, Node]], blocks: Mapping[int, Mapping[Node, Block]]
    ) -> tuple[list[Tensor], Tensor]:
        """Look up nodes, given as slot, tree and node, in ``blocks``, given by slot and node.

        Returns:
            Logits [draft vocabulary] behind each, and the states [M, hidden] that their own tokens were drawn from,
            0 for roots.
        """
        logits: list[Tensor] = []
        states: list[Tensor] = []
        for slot, tree, node in asked:
            block, offset = self._block_of(tree, node)
            logits.append(blocks[slot][block].logits[offset])
            if node < 0:
                states.append(torch.zeros_like(blocks[slot][block].states[0]))
            else:
                block, offset = self._block_of(tree, self.parents[tree][node])
                states.append(blocks[slot][block].states[offset])
        return logits, torch.stack(states)

    def _block_of(self, tree: int, node: Node) -> tuple[Node, int]:
        """Return the block that answers for what follows a node, and the place in it."""
        offset = 0 if node < 0 else self._depths[tree][node] % self._size
        for _ in range(offset):
            node = self.parents[tree][node]
        return node, offset

    @property
    def wanted(self) -> Tensor:
        """[M] the rows of answers, in order."""
        return torch.tensor(self._wanted)

    def rows(self) -> PackedRows:
        """Return all rows, on the host."""
        return self._rows.build()
