"""Draft trees as tensors: tokens, parents, and the distributions that the tokens were drawn from.

Node i of a sequence is the i-th token drawn for it. So parents come before children, and siblings are in draw order. A
chain is a tree in which node i is the child of node i - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache

import torch
from torch import Tensor

from osd.runtime.device import to_lists
from osd.runtime.memory import recycled

ROOT = -1
"""Parent of a first token: the last committed token of the sequence."""

BLOCK = 256
"""Tokens of a block of a draft vocabulary; sums over blocks make draws of siblings fast."""


class Draw(Enum):
    """Way in which the children of a node were chosen; it determines which rules may verify them."""

    IID = "iid"
    """Independent draws from the node's q; duplicates are separate draws."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Draws from the node's q without the earlier siblings, renormalised."""
    TOP_THEN_DRAWN = "top_then_drawn"
    """The most probable tokens of q, then a last child drawn from q without them, renormalised."""
    DETERMINISTIC = "deterministic"
    """Choice without randomness, such as the most probable tokens of q or a retrieved continuation."""

    @property
    def code(self) -> int:
        """Number of this way in tensors."""
        return _CODES[self]


_CODES = {draw: code for code, draw in enumerate(Draw)}


@dataclass(frozen=True)
class DraftBatch:
    """Draft trees of B sequences with at most N nodes each.

    The root is the last committed token of a sequence and not a node. In tensors [B, N], entries from a sequence's
    size on are padding with undefined values; ``valid`` is the mask of the nodes.

    Attributes:
        tokens: [B, N] int64, target ids.
        columns: [B, N] int64, column of each node's token in its row of ``q``, -1 for none.
        parents: [B, N] int64, number of each node's parent, ``ROOT`` for the root's children.
        sizes: [B] int64, number of nodes.
        q: [E, K], E exact distributions over K columns that tokens were drawn from, for all sequences together; None if
            no token was drawn.
        q_row: [B, N] int64, the row of ``q`` that a node and its siblings were drawn from, -1 for none.
        support: [K] int64, target ids of the columns, the draft vocabulary; None for the whole vocabulary.
        draw: [B, N] int8, ``Draw.code`` of the way in which a node and its siblings were chosen.
        source: [B, N] int8, index in ``sources`` of the node's proposer.
        sources: names of proposers.
        q_ids: [E, K] int64, target ids of the columns of sparse distributions, in place of ``support``. They differ
            within a row, except in columns of probability 0.
        estimates: [B, N], scores by which the growth policy chose the nodes, for the policy itself; None for none.
    """

    tokens: Tensor
    columns: Tensor
    parents: Tensor
    sizes: Tensor
    q: Tensor | None
    q_row: Tensor
    support: Tensor | None
    draw: Tensor
    source: Tensor
    sources: tuple[str, ...]
    q_ids: Tensor | None = None
    estimates: Tensor | None = None

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> DraftBatch:
        """Return a batch of ``batch`` trees without nodes, for plain decoding."""
        return _empty(batch, torch.device(device))

    @classmethod
    def chosen(
        cls, trees: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu"
    ) -> DraftBatch:
        """Return trees of deterministically chosen tokens, without q, from the tokens and parents of their nodes."""
        sizes = [len(tokens) for tokens, _ in trees]
        width = max(sizes, default=0)
        padded = [[*tokens, *[-1] * (width - len(tokens))] for tokens, _ in trees]
        above = [[*parents, *[ROOT] * (width - len(parents))] for _, parents in trees]
        ids = torch.tensor(padded, dtype=torch.int64, device=device).view(len(trees), width)
        parents = torch.tensor(above, dtype=torch.int64, device=device).view(ids.shape)
        return cls.grown(ids, parents, torch.tensor(sizes, dtype=torch.int64, device=device))

    @classmethod
    def grown(
        cls,
        tokens: Tensor,
        parents: Tensor,
        sizes: Tensor,
        estimates: Tensor | None = None,
        support: Tensor | None = None,
    ) -> DraftBatch:
        """Return trees of deterministically chosen tokens from tensors, which may be wider than the largest tree."""
        width = int(sizes.max()) if tokens.numel() else 0
        ids = tokens[:, :width]
        nowhere = torch.full_like(ids, -1)
        return cls(
            tokens=ids,
            columns=nowhere,
            parents=parents[:, :width],
            sizes=sizes,
            q=None,
            q_row=nowhere,
            support=support,
            draw=torch.full_like(ids, Draw.DETERMINISTIC.code, dtype=torch.int8),
            source=torch.zeros_like(ids, dtype=torch.int8),
            sources=("drafter",),
            estimates=None if estimates is None else estimates[:, :width],
        )

    @classmethod
    def chains(
        cls,
        tokens: Tensor,
        sizes: Tensor,
        support: Tensor | None,
        columns: Tensor | None = None,
        q: Tensor | None = None,
    ) -> DraftBatch:
        """Return chains of ``tokens`` [B, N] without waiting for the device.

        With ``q`` [B, N, K] the tokens were drawn as its ``columns`` [B, N], else they are the most probable tokens.
        """
        batch, count = tokens.shape
        nowhere, parents, every, draw, source = _chain_parts(batch, count, q is not None, tokens.device)
        return cls(
            tokens=tokens,
            columns=nowhere if columns is None else columns,
            parents=parents,
            sizes=sizes,
            q=None if q is None else q.flatten(0, 1),
            q_row=nowhere if q is None else every,
            support=support,
            draw=draw,
            source=source,
            sources=("drafter",),
        )

    @property
    def valid(self) -> Tensor:
        """Mask of the nodes, [B, N] bool."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.sizes[:, None]

    def token_lists(self) -> list[list[int]]:
        """Return the token ids of each tree; waits for the device."""
        return [ids[:size] for ids, size in zip(*to_lists([self.tokens, self.sizes]), strict=True)]

    def depths(self) -> Tensor:
        """Return the depth of each node, [B, N] int64: 1 for the root's children, 0 for padding."""
        return self.ancestors().sum(-1)

    def ancestors(self) -> Tensor:
        """Return [B, N, N] bool, whether node j is node i or an ancestor of node i; rows of padding are false."""
        index = torch.arange(self.parents.shape[1], device=self.parents.device)
        # Whether j is at most 1 level above i, then at most 2, 4, 8 ...
        reach = ((self.parents[:, :, None] == index) | (index[:, None] == index)).float()
        for _ in range((len(index) - 1).bit_length()):
            reach = (reach @ reach).clamp_(max=1)
        return reach.bool() & self.valid[:, :, None]

    def path_of(self, nodes: Tensor) -> Tensor:
        """Return the nodes from the root to ``nodes`` [B], [B, deepest], then -1; all -1 for ``ROOT``."""
        batch, count = self.parents.shape
        if not count:
            return self.parents
        above = self.ancestors()
        on_path = above[torch.arange(batch, device=nodes.device), nodes.clamp(min=0)]  # [B, N]
        on_path &= (nodes >= 0)[:, None]
        order = torch.where(on_path, torch.arange(count, device=nodes.device), count).sort(-1).values
        return order.masked_fill(order == count, -1)[:, : int(above.sum(-1).max())]

    def links(self) -> tuple[Tensor, Tensor]:
        """Return the first child after each row of p, [B, N + 1], and each node's next sibling, [B, N]; -1 for none."""
        count = self.parents.shape[1]
        if not count:
            return self.parents.new_full((len(self.parents), 1), -1), self.parents
        index = torch.arange(count, device=self.parents.device)
        above = self.parents.masked_fill(~self.valid, count)[:, None, :]  # [B, 1, N]; padding has no parent
        owners = torch.arange(ROOT, count, device=self.parents.device)[:, None]
        first = torch.where(above == owners, index, count).amin(-1)
        later = (above == self.parents[:, :, None]) & (index > index[:, None])
        following = torch.where(later, index, count).amin(-1)
        return first.masked_fill(first == count, -1), following.masked_fill(following == count, -1)

    def drawn(self, draw: Draw) -> Tensor:
        """Return [B, N] bool, whether a node and its siblings were chosen by ``draw``; padding is undefined."""
        return self.draw == draw.code

    @property
    def distributions(self) -> Tensor:
        """Tensor ``q``, without rows if there are no nodes.

        Raises:
            ValueError: tokens were chosen without distributions.
        """
        if self.q is not None:
            return self.q
        if self.tokens.numel():
            raise ValueError("the tokens of this draft were chosen without distributions")
        return torch.empty(0, 0, device=self.tokens.device)

    def q_at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return a copy [M, K] of the distributions that ``nodes`` [M] of sequences ``rows`` [M] were drawn from."""
        return self.distributions[self.q_row[rows, nodes]]

    def shares(self) -> Tensor:
        """Return the probability [B, N] of each node's token in its row of ``q``; padding is undefined."""
        q = self.distributions
        return q[self.q_row, self.columns.clamp(min=0)] if self.tokens.numel() else q.new_empty(self.tokens.shape)

    def spread(self, values: Tensor, rows: Tensor, nodes: Tensor, vocabulary: int) -> Tensor:
        """Scatter values from the columns of ``q`` to target ids.

        Args:
            values: [M, K], in the columns of the result of ``q_at`` for the same rows and nodes.
            rows: [M], the sequence of each node.
            nodes: [M].
            vocabulary: V, size of the target's vocabulary.

        Returns:
            [M, V], 0 for ids without a column.
        """
        if self.q_ids is not None:
            ids = self.q_ids[self.q_row[rows, nodes]]
            return values.new_zeros(len(values), vocabulary).scatter_add_(1, ids, values)
        if self.support is None:
            return values
        return values.new_zeros(len(values), vocabulary).index_copy_(1, self.support, values)

    def select(self, rows: Tensor) -> DraftBatch:
        """Return the draft trees of sequences ``rows`` [M]; they share all distributions."""
        names = "tokens", "columns", "parents", "sizes", "q_row", "draw", "source"
        return replace(self, estimates=None, **{name: getattr(self, name)[rows] for name in names})


@lru_cache(64)
def _chain_parts(batch: int, count: int, drawn: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Return tensors [batch, count] for all chains of this size: -1, parents, numbers, draws and sources."""
    every = torch.arange(batch * count, device=device).view(batch, count)
    draw = torch.full_like(every, (Draw.IID if drawn else Draw.DETERMINISTIC).code, dtype=torch.int8)
    parents = (every[0] - 1).expand(batch, -1)
    return torch.full_like(every, -1), parents, every, draw, torch.zeros_like(draw)


@cache
def _empty(batch: int, device: torch.device) -> DraftBatch:
    return TreeBuilder(batch, 0, None, device).finish(Draw.IID)


def _ids(columns: Tensor, q_row: Tensor | None, q_ids: Tensor | None, support: Tensor | None) -> Tensor:
    """Return the target ids [M] of ``columns`` [M] in the distributions ``q_row`` [M]."""
    if q_ids is not None and q_row is not None:
        return q_ids[q_row, columns]
    return columns if support is None else support[columns]


def repeats(rows: Tensor) -> Tensor:
    """Return for each entry of ``rows`` [M] the number of equal entries before it, [M] int64."""
    order = rows.argsort(stable=True)
    ordered = rows[order]
    rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(rank).index_copy_(0, order, rank)


class TreeBuilder:
    """Growing draft trees of B sequences; nodes are added and never removed.

    Drafters read ``tokens``, ``columns``, ``parents``, ``depths`` [B, capacity] and ``sizes`` [B]; see ``DraftBatch``.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        support: Tensor | None,
        device: torch.device | str = "cpu",
        sources: tuple[str, ...] = ("drafter",),
    ) -> None:
        """Start without nodes.

        Args:
            batch: B, number of sequences.
            capacity: limit of nodes per sequence.
            support: [Vd], target ids of the draft vocabulary; None for the whole vocabulary.
            device: of the tensors.
            sources: names of proposers; the first is the default of ``add``.
        """
        self.support = support
        self.sources = sources
        self.capacity = capacity
        self.tokens = torch.full((batch, capacity), -1, device=device)
        self.columns = torch.full((batch, capacity), -1, device=device)
        self.parents = torch.full((batch, capacity), ROOT, device=device)
        self.depths = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        self.sizes = torch.zeros(batch, dtype=torch.int64, device=device)
        self.q: Tensor | None = None  # [B * capacity, K rounded up to whole blocks], filled from row 0
        self.q_ids: Tensor | None = None  # [B * capacity, K] of sparse distributions
        self.q_row = torch.full((batch, capacity), -1, device=device)
        self._draw: Tensor | None = None  # [B, capacity] codes, -1 for the way of ``finish``; None if all have it
        self._source: Tensor | None = None  # [B, capacity], None if all are the first
        self._used = 0
        self._width = 0

    def new_rows(self, count: int, width: int, dtype: torch.dtype, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Allocate rows of ``q``; all rows of a builder are dense or all are sparse.

        Args:
            count: M, number of distributions.
            width: K, tokens of a distribution.
            dtype: of the distributions.
            ids: [M, K], target ids of sparse distributions; None for distributions over the draft vocabulary.

        Returns:
            The numbers of the rows [M], for ``add``, and the rows [M, K] to fill.
        """
        if self.q is None:
            self._width = width
            blocks = -(-width // BLOCK) * BLOCK
            # Not initialised: unused rows are never read and cost nothing.
            self.q = recycled((self.tokens.numel(), blocks), dtype, self.tokens.device)
            if ids is not None:
                self.q_ids = ids.new_empty(len(self.q), width)
        end = self._used + count
        rows = self.q[self._used : end]
        rows[:, width:] = 0.0
        if self.q_ids is not None and ids is not None:
            self.q_ids[self._used : end] = ids
        places = torch.arange(self._used, end, device=self.q.device)
        self._used = end
        return places, rows[:, :width]

    def extend(self, rows: Tensor, level: int, columns: Tensor, q_row: Tensor) -> None:
        """Add a node to each of the distinct chains ``rows`` [M], which have ``level`` nodes; see ``add``."""
        self.sizes[rows] = level + 1
        self.columns[rows, level] = columns
        self.tokens[rows, level] = _ids(columns, q_row, self.q_ids, self.support)
        self.parents[rows, level] = level - 1
        self.q_row[rows, level] = q_row
        self.depths[rows, level] = level + 1

    def add(
        self,
        rows: Tensor,
        parents: Tensor,
        columns: Tensor,
        q_row: Tensor | None,
        draw: Draw | None = None,
        source: int = 0,
    ) -> Tensor:
        """Add a node for each entry of ``rows`` and return the numbers of the new nodes [M].

        Args:
            rows: [M], the sequences. A sequence may occur several times; its nodes are numbered in this order.
            parents: [M], nodes or ``ROOT``.
            columns: [M], columns of the tokens in their distributions, or in the draft vocabulary without ``q_row``.
            q_row: [M], rows of the distributions that the tokens were drawn from; None if they were not drawn.
            draw: way in which the tokens were chosen; None for the argument of ``finish``.
            source: index in ``sources`` of the proposer.
        """
        alone = len(self.sizes) == 1
        nodes = self.sizes[rows] + (torch.arange(len(rows), device=rows.device) if alone else repeats(rows))
        self.sizes.index_add_(0, rows, torch.ones_like(rows))
        if q_row is not None:
            self.columns[rows, nodes] = columns
            self.q_row[rows, nodes] = q_row
        self.tokens[rows, nodes] = _ids(columns, q_row, self.q_ids, self.support)
        self.parents[rows, nodes] = parents
        if draw is not None:
            if self._draw is None:
                self._draw = torch.full_like(self.tokens, -1, dtype=torch.int8)
            self._draw[rows, nodes] = draw.code
        if source:
            if self._source is None:
                self._source = torch.zeros_like(self.tokens, dtype=torch.int8)
            self._source[rows, nodes] = source
        above = self.depths[rows, parents.clamp(min=0)] * (parents >= 0)
        self.depths[rows, nodes] = above + 1
        return nodes

    def finish(self, draw: Draw) -> DraftBatch:
        """Return the trees, as wide as the largest; ``draw`` applies to nodes that were added without a way."""
        count = int(self.sizes.max()) if self.tokens.numel() else 0
        codes = torch.full((len(self.sizes), count), draw.code, dtype=torch.int8, device=self.tokens.device)
        if self._draw is not None:
            codes = torch.where(self._draw[:, :count] < 0, codes, self._draw[:, :count])
        source = torch.zeros_like(codes) if self._source is None else self._source[:, :count]
        return DraftBatch(
            tokens=self.tokens[:, :count],
            columns=self.columns[:, :count],
            parents=self.parents[:, :count],
            sizes=self.sizes,
            q=None if self.q is None else self.q[: self._used, : self._width],
            q_row=self.q_row[:, :count],
            support=self.support,
            draw=codes,
            source=source,
            sources=self.sources,
            q_ids=None if self.q_ids is None else self.q_ids[: self._used],
        )
