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
"""Number of a tree node from 0 on, or -1 for the root; a block is named by the node before it."""


def path_to(parents: Sequence[Node], node: Node) -> list[Node]:
    """Return the nodes from the root's child to ``node``, both included; an empty list for the root."""
    path: list[Node] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def append_row(builder: RowBuilder, slot: int, place: int, node: Node, token: int, parents: Sequence[Node]) -> None:
    """Append a node, or the root, to the rows of the target's layers, at its place in verification.

    The root is the last committed token, at ``place``. ``parents`` are those of the tree's nodes.
    """
    if node < 0:
        builder.tokens(slot, place, [token])
    else:
        builder.node(slot, place + 1, node, token, paths(parents[: node + 1])[node])


@dataclass(frozen=True)
class BlockOutput:
    """Output of one call: ``logits`` [size, draft vocabulary], and the ``states`` [size, hidden] before the head."""

    logits: Tensor
    states: Tensor


class TreeRows:
    """Rows of several slots in one ragged forward.

    Committed tokens go to the places after the slot's length. Node i of a tree goes to the scratch place i after them;
    it sees the committed places, its ancestors and itself. The root and every ``size``-th node of a path take a call,
    whose output covers the next ``size`` levels. ``parents`` holds the parents of each tree's nodes.
    """

    def __init__(
        self,
        builder: TreeBuilder,
        cache: KVCache,
        expanded: tuple[Tensor, ...] = (),
        size: int = 1,
        own_ids: np.ndarray | None = None,
    ) -> None:
        """Start without rows, for the trees in ``builder`` and the drafter's ``cache``.

        ``expanded`` are tree numbers [M] and nodes [M], which the attribute of this name holds as lists. ``own_ids``
        [target vocabulary] are the model's tokens for those of the target, None if they are equal.
        """
        self.parents: list[list[Node]]
        self.parents, self._tokens, self._depths, *self.expanded = to_lists(
            [builder.parents, builder.tokens, builder.depths, *expanded]
        )
        self._cache, self._size, self._own_ids = cache, size, own_ids
        self._rows = RowBuilder()
        self._paths: list[list[int]] = [[] for _ in self.parents]
        self._wanted: list[int] = []

    def __len__(self) -> int:
        """Return the number of rows so far."""
        return len(self._rows)

    def sees(self, tree: int, node: Node) -> int:
        """Return the places of a node and its ancestors as bits; see ``osd.runtime.batch.paths``."""
        known = self._paths[tree]
        known += paths(self.parents[tree][len(known) : node + 1], known)
        return known[node]

    def add(self, slot: int, tree: int, node: Node, seen: Node | None = None) -> int:
        """Append a node of ``tree`` that sees the path to ``seen``, by default to itself; return its row."""
        token = self._tokens[tree][node]
        token = token if self._own_ids is None else int(self._own_ids[token])
        path = self.sees(tree, node)
        further = () if seen is None else (self.sees(tree, seen),)
        return self._rows.node(slot, self._cache.length[slot], node, token, path, *further)

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Append committed tokens; the output after the last one is wanted."""
        start = self._cache.length[slot]
        self._rows.tokens(slot, start, tokens)
        self._cache.length[slot] = start + len(tokens)
        self._wanted.append(len(self._rows) - 1)

    def node(self, slot: int, tree: int, node: Node) -> None:
        """Append a node of ``tree``; the output after it is wanted."""
        self._wanted.append(self.add(slot, tree, node))

    def begins(self, tree: int, node: Node) -> bool:
        """Return whether a node takes a separate call."""
        return node < 0 or self._depths[tree][node] % self._size == 0

    def outputs(
        self, nodes: Sequence[tuple[int, int, Node]], blocks: Mapping[int, Mapping[Node, BlockOutput]]
    ) -> tuple[list[Tensor], Tensor]:
        """Look up nodes, given as (slot, tree, node), in ``blocks`` by slot and node.

        Returns:
            The logits [draft vocabulary] after each, and the states [M, hidden] that their own tokens were drawn from,
            0 for roots.
        """
        logits: list[Tensor] = []
        states: list[Tensor] = []
        for slot, tree, node in nodes:
            block, offset = self._block_of(tree, node)
            logits.append(blocks[slot][block].logits[offset])
            if node < 0:
                states.append(torch.zeros_like(blocks[slot][block].states[0]))
            else:
                block, offset = self._block_of(tree, self.parents[tree][node])
                states.append(blocks[slot][block].states[offset])
        return logits, torch.stack(states)

    def _block_of(self, tree: int, node: Node) -> tuple[Node, int]:
        """Return the block with the output after a node, and the index in it."""
        offset = 0 if node < 0 else self._depths[tree][node] % self._size
        for _ in range(offset):
            node = self.parents[tree][node]
        return node, offset

    @property
    def wanted(self) -> Tensor:
        """[M] rows whose outputs are wanted, in order."""
        return torch.tensor(self._wanted)

    def rows(self) -> PackedRows:
        """Return the rows added so far, for one forward, on the host."""
        return self._rows.build()
