"""Draft trees: what was drawn, from which distribution, and in which order.

A batch of trees is a handful of rectangular tensors. Node i of a sequence was the i-th token drawn for it, so parents
come before children and siblings stand in draw order; a chain is the tree in which node i hangs on node i - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from osd.runtime.memory import recycled

ROOT = -1
"""The parent of a first token: the last committed token of the sequence."""

BLOCK = 256
"""Tokens of one block of a draft vocabulary; sums over blocks make drawing siblings cheap."""


class Draw(Enum):
    """How the children of one node were chosen; it decides which rules may verify them."""

    IID = "iid"
    """Each drawn from the node's q, whatever its siblings are; duplicates are draws of their own."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Each drawn from the node's q with the earlier siblings taken out and the rest renormalised."""
    TOP_THEN_DRAWN = "top_then_drawn"
    """The most probable tokens of q, then one last child drawn from q with them taken out and renormalised."""
    DETERMINISTIC = "deterministic"
    """Chosen without chance, such as the most probable tokens of q or a retrieved continuation."""


@dataclass(frozen=True)
class DraftBatch:
    """The draft trees of B sequences, with N nodes at most and Vd tokens in the draft vocabulary.

    ``tokens`` [B, N] int64 target ids, -1 where a sequence has fewer nodes; ``columns`` [B, N] int64 the same tokens as
    places of the draft vocabulary; ``parents`` [B, N] int64, ROOT for the root's children; ``sizes`` [B] int64.

    ``q`` [E, Vd] are the very distributions that were sampled from, those of all sequences one below the other, and
    ``q_row`` [B, N] int64 says which of them each node's parent had. ``draw`` says how siblings share it. ``support``
    [Vd] int64 are the target ids of the draft vocabulary, None when it is the whole vocabulary. Entries past a
    sequence's size mean nothing.
    """

    tokens: Tensor
    columns: Tensor
    parents: Tensor
    sizes: Tensor
    q: Tensor
    q_row: Tensor
    support: Tensor | None
    draw: Draw

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> DraftBatch:
        """No draft for any of ``batch`` sequences: verification then decodes plainly."""
        return TreeBuilder(batch, 0, None, device).finish(Draw.IID)

    @property
    def valid(self) -> Tensor:
        """[B, N] bool, which entries are nodes."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.sizes[:, None]

    def depths(self) -> Tensor:
        """[B, N] int64, tokens from the root to each node: 1 for the root's children, 0 for padding."""
        return self.ancestors().sum(-1)

    def ancestors(self) -> Tensor:
        """[B, N, N] bool, whether node j is node i or one of its ancestors; rows of padding are empty."""
        return ancestors(self.parents, self.sizes)

    def path_of(self, nodes: Tensor) -> Tensor:
        """[B, deepest] the nodes from the root to ``nodes`` [B], then -1; all -1 for ROOT."""
        batch, count = self.parents.shape
        if not count:
            return self.parents
        above = self.ancestors()
        on_path = above[torch.arange(batch, device=nodes.device), nodes.clamp(min=0)]  # [B, N]
        on_path &= (nodes >= 0)[:, None]
        order = torch.where(on_path, torch.arange(count, device=nodes.device), count).sort(-1).values
        return order.masked_fill(order == count, -1)[:, : int(above.sum(-1).max())]

    def links(self) -> tuple[Tensor, Tensor]:
        """The first child after each row of p, [B, N + 1], and the next sibling of each node, [B, N]; -1 for none."""
        count = self.parents.shape[1]
        if not count:
            return self.parents.new_full((len(self.parents), 1), -1), self.parents
        index = torch.arange(count, device=self.parents.device)
        above = self.parents.masked_fill(~self.valid, count)[:, None, :]  # [B, 1, N]; padding is nobody's child
        owners = torch.arange(ROOT, count, device=self.parents.device)[:, None]
        first = torch.where(above == owners, index, count).amin(-1)
        later = (above == self.parents[:, :, None]) & (index > index[:, None])
        following = torch.where(later, index, count).amin(-1)
        return first.masked_fill(first == count, -1), following.masked_fill(following == count, -1)

    def q_at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """[M, Vd] a copy of the distributions that the parents of ``nodes`` [M] of sequences ``rows`` [M] had."""
        return self.q[self.q_row[rows, nodes]]

    def shares(self) -> Tensor:
        """[B, N] the probability of each node's token in its parent's q; anything for padding."""
        if not self.tokens.numel():
            return self.q.new_empty(self.tokens.shape)
        return self.q[self.q_row, self.columns.clamp(min=0)]

    def spread(self, values: Tensor, vocabulary: int) -> Tensor:
        """[M, V] values of the draft vocabulary at their target ids, 0 elsewhere."""
        if self.support is None:
            return values
        return values.new_zeros(len(values), vocabulary).index_copy_(1, self.support, values)

    def select(self, rows: Tensor) -> DraftBatch:
        """The draft trees of sequences ``rows`` [M]; they still share all distributions."""
        return replace(
            self,
            tokens=self.tokens[rows],
            columns=self.columns[rows],
            parents=self.parents[rows],
            sizes=self.sizes[rows],
            q_row=self.q_row[rows],
        )

    def check_integrity(self) -> None:
        """Check what the rules rely on.

        Raises:
            ValueError: a node comes before its parent, a token is not its column's, or one was drawn that q excludes.
        """
        count = self.tokens.shape[1]
        valid, index = self.valid, torch.arange(count, device=self.tokens.device)
        if not ((self.parents >= ROOT) & (self.parents < index))[valid].all():
            raise ValueError("a node of the draft tree does not come after its parent")
        columns, tokens = self.columns[valid], self.tokens[valid]
        if not torch.equal(columns if self.support is None else self.support[columns], tokens):
            raise ValueError("a token of the draft tree is not the one that its column of the draft vocabulary means")
        rows, nodes = valid.nonzero(as_tuple=True)
        if self.draw is Draw.IID and not (self.shares()[rows, nodes] > 0).all():
            raise ValueError("a token of the draft tree has probability 0 in the distribution it was drawn from")
        twins = (self.parents[:, :, None] == self.parents[:, None, :]) & valid[:, :, None] & valid[:, None, :]
        if not (self.q_row[:, :, None] == self.q_row[:, None, :])[twins].all():
            raise ValueError("siblings of the draft tree name different distributions")
        equal = twins & (self.tokens[:, :, None] == self.tokens[:, None, :])
        if self.draw is not Draw.IID and equal.sum() != valid.sum():
            raise ValueError("a token of the draft tree stands twice under one parent though drawn without replacement")


def ancestors(parents: Tensor, sizes: Tensor) -> Tensor:
    """[B, N, N] bool, whether node j is node i or one of its ancestors, for ``parents`` [B, N] and ``sizes`` [B]."""
    index = torch.arange(parents.shape[1], device=parents.device)
    # Whether j is at most 1 step above i, then at most 2, 4, 8 ...
    reach = ((parents[:, :, None] == index) | (index[:, None] == index)).float()
    for _ in range((len(index) - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return reach.bool() & (index < sizes[:, None])[:, :, None]


def repeats(rows: Tensor) -> Tensor:
    """[M] int64, how often each entry of ``rows`` [M] occurs before itself."""
    order = rows.argsort(stable=True)
    ordered = rows[order]
    rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(rank).index_copy_(0, order, rank)


class TreeBuilder:
    """Draft trees while they grow: nodes are added and never taken away.

    Drafters read ``tokens``, ``columns``, ``parents``, ``depths`` [B, capacity] and ``sizes`` [B]; the meaning of
    each is that of ``DraftBatch``.
    """

    def __init__(self, batch: int, capacity: int, support: Tensor | None, device: torch.device | str = "cpu") -> None:
        """Start with bare roots.

        Args:
            batch: sequences B.
            capacity: nodes of one sequence at most.
            support: [Vd] target ids of the draft vocabulary, None for the whole vocabulary.
            device: where the tensors live.
        """
        self.support = support
        self.capacity = capacity
        self.tokens = torch.full((batch, capacity), -1, device=device)
        self.columns = torch.full((batch, capacity), -1, device=device)
        self.parents = torch.full((batch, capacity), ROOT, device=device)
        self.depths = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        self.sizes = torch.zeros(batch, dtype=torch.int64, device=device)
        self.q: Tensor | None = None  # [B * capacity, Vd rounded up to whole blocks], filled from above
        self.q_row = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        self._used = 0
        self._vocabulary = 0

    def new_rows(self, count: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Make room for ``count`` distributions over the draft vocabulary.

        Returns:
            [M] their places, for ``add``, and [M, Vd] the room itself, to be filled by the caller.
        """
        if self.q is None:
            self._vocabulary = vocabulary
            width = -(-vocabulary // BLOCK) * BLOCK
            # Not initialised: rows past the last are never read, and a large vocabulary costs only what is used.
            self.q = recycled((self.tokens.numel(), width), dtype, self.tokens.device)
        end = self._used + count
        rows = self.q[self._used : end]
        rows[:, vocabulary:] = 0.0
        places = torch.arange(self._used, end, device=self.q.device)
        self._used = end
        return places, rows[:, :vocabulary]

    def extend(self, rows: Tensor, level: int, columns: Tensor, q_row: Tensor) -> None:
        """Add node ``level`` to each of the chains ``rows`` [M], named once and ``level`` nodes long; see ``add``."""
        self.sizes[rows] = level + 1
        self.columns[rows, level] = columns
        self.tokens[rows, level] = columns if self.support is None else self.support[columns]
        self.parents[rows, level] = level - 1
        self.q_row[rows, level] = q_row
        self.depths[rows, level] = level + 1

    def add(self, rows: Tensor, parents: Tensor, columns: Tensor, q_row: Tensor) -> Tensor:
        """Add one node for each entry of ``rows`` [M] and return the new nodes [M].

        Args:
            rows: sequences; one may occur several times, its nodes are then numbered in this order.
            parents: [M] nodes, or ROOT.
            columns: [M] the drawn tokens as places of the draft vocabulary.
            q_row: [M] the places of the parents' distributions.
        """
        nodes = self.sizes[rows] + repeats(rows)
        self.sizes.index_add_(0, rows, torch.ones_like(rows))
        self.columns[rows, nodes] = columns
        self.tokens[rows, nodes] = columns if self.support is None else self.support[columns]
        self.parents[rows, nodes] = parents
        self.q_row[rows, nodes] = q_row
        above = self.depths[rows, parents.clamp(min=0)] * (parents >= 0)
        self.depths[rows, nodes] = above + 1
        return nodes

    def finish(self, draw: Draw) -> DraftBatch:
        """The trees as they are now, as wide as the largest of them."""
        count = int(self.sizes.max()) if len(self.sizes) else 0
        q = self.tokens.new_empty(0, 0, dtype=torch.float32) if self.q is None else self.q
        return DraftBatch(
            tokens=self.tokens[:, :count],
            columns=self.columns[:, :count],
            parents=self.parents[:, :count],
            sizes=self.sizes,
            q=q[: self._used, : self._vocabulary],
            q_row=self.q_row[:, :count],
            support=self.support,
            draw=draw,
        )
