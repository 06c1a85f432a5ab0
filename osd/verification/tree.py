"""Draft trees: what was drawn, from which distribution, and in which order.

A batch of trees is a handful of rectangular tensors. Node i of a sequence was the i-th token drawn for it, so parents
come before children and siblings stand in draw order; a chain is the tree in which node i hangs on node i - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache

import torch
from torch import Tensor

from osd.runtime.device import lists
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

    @property
    def code(self) -> int:
        """Its number in tensors."""
        return _CODES[self]


_CODES = {draw: code for code, draw in enumerate(Draw)}


@dataclass(frozen=True)
class DraftBatch:
    """The draft trees of B sequences, with N nodes at most. Entries past a sequence's size mean nothing.

    ``tokens`` [B, N] int64 target ids, -1 where a sequence has fewer nodes; ``parents`` [B, N] int64, ROOT for the
    root's children; ``sizes`` [B] int64. ``draw`` [B, N] int8 is the code of the ``Draw`` by which a node and its
    siblings were chosen; ``source`` [B, N] int8 says which of ``sources`` proposed it.

    ``q`` [E, K] are the very distributions that were sampled from, those of all sequences one below the other, None
    where no node was drawn. ``q_row`` [B, N] int64 says which of them a node and its siblings were drawn from, and
    ``columns`` [B, N] int64 at which place of it the node's token stands; both are -1 where there is none. The target
    ids of these places are, for sparse distributions, ``q_ids`` [E, K] int64, different ones in each row but for places
    of probability 0; else ``support`` [K] int64, the draft vocabulary, or None when that is the whole vocabulary.

    ``estimates`` [B, N] are what the growth policy placed its nodes by, for itself; None where it wants none back.
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
        """No draft for any of ``batch`` sequences: verification then decodes plainly."""
        return _empty(batch, torch.device(device))

    @classmethod
    def chosen(
        cls, trees: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str = "cpu"
    ) -> DraftBatch:
        """Trees of deterministically chosen tokens, given as tokens and parents of their nodes; they have no q."""
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
        """The same of tensors, which may be wider than the largest tree."""
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
        """Chains of ``tokens`` [B, N]: the most probable ones, or drawn as ``columns`` [B, N] of ``q`` [B, N, K].

        The device is not waited for.
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
        """[B, N] bool, which entries are nodes."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.sizes[:, None]

    def token_lists(self) -> list[list[int]]:
        """Return the token ids of each tree; waits for the device."""
        return [ids[:size] for ids, size in zip(*lists([self.tokens, self.sizes]), strict=True)]

    def depths(self) -> Tensor:
        """[B, N] int64, tokens from the root to each node: 1 for the root's children, 0 for padding."""
        return self.ancestors().sum(-1)

    def ancestors(self) -> Tensor:
        """[B, N, N] bool, whether node j is node i or one of its ancestors; rows of padding are empty."""
        index = torch.arange(self.parents.shape[1], device=self.parents.device)
        # Whether j is at most 1 step above i, then at most 2, 4, 8 ...
        reach = ((self.parents[:, :, None] == index) | (index[:, None] == index)).float()
        for _ in range((len(index) - 1).bit_length()):
            reach = (reach @ reach).clamp_(max=1)
        return reach.bool() & self.valid[:, :, None]

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

    def drawn(self, draw: Draw) -> Tensor:
        """[B, N] bool, whether a node and its siblings were chosen in this way; anything for padding."""
        return self.draw == draw.code

    @property
    def distributions(self) -> Tensor:
        """``q``, without rows for drafts without nodes.

        Raises:
            ValueError: tokens were chosen without distributions.
        """
        if self.q is not None:
            return self.q
        if self.tokens.numel():
            raise ValueError("the tokens of this draft were chosen without distributions")
        return torch.empty(0, 0, device=self.tokens.device)

    def q_at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """[M, K] a copy of the distributions that the parents of ``nodes`` [M] of sequences ``rows`` [M] had."""
        return self.distributions[self.q_row[rows, nodes]]

    def shares(self) -> Tensor:
        """[B, N] the probability of each node's token in its parent's q; anything for padding."""
        q = self.distributions
        return q[self.q_row, self.columns.clamp(min=0)] if self.tokens.numel() else q.new_empty(self.tokens.shape)

    def spread(self, values: Tensor, rows: Tensor, nodes: Tensor, vocabulary: int) -> Tensor:
        """[M, V] at their target ids the ``values`` [M, K] at the places of what ``q_at`` gives, 0 elsewhere."""
        if self.q_ids is not None:
            ids = self.q_ids[self.q_row[rows, nodes]]
            return values.new_zeros(len(values), vocabulary).scatter_add_(1, ids, values)
        if self.support is None:
            return values
        return values.new_zeros(len(values), vocabulary).index_copy_(1, self.support, values)

    def select(self, rows: Tensor) -> DraftBatch:
        """The draft trees of sequences ``rows`` [M]; they still share all distributions."""
        names = "tokens", "columns", "parents", "sizes", "q_row", "draw", "source"
        return replace(self, estimates=None, **{name: getattr(self, name)[rows] for name in names})


@lru_cache(64)
def _chain_parts(batch: int, count: int, drawn: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors [batch, count] that all chains of a size share: -1, parents, numbers, draws and sources."""
    every = torch.arange(batch * count, device=device).view(batch, count)
    draw = torch.full_like(every, (Draw.IID if drawn else Draw.DETERMINISTIC).code, dtype=torch.int8)
    parents = (every[0] - 1).expand(batch, -1)
    return torch.full_like(every, -1), parents, every, draw, torch.zeros_like(draw)


@cache
def _empty(batch: int, device: torch.device) -> DraftBatch:
    return TreeBuilder(batch, 0, None, device).finish(Draw.IID)


def _ids(columns: Tensor, q_row: Tensor | None, q_ids: Tensor | None, support: Tensor | None) -> Tensor:
    """[M] the target ids of ``columns`` [M], places of the distributions ``q_row`` [M]."""
    if q_ids is not None and q_row is not None:
        return q_ids[q_row, columns]
    return columns if support is None else support[columns]


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

    def __init__(
        self,
        batch: int,
        capacity: int,
        support: Tensor | None,
        device: torch.device | str = "cpu",
        sources: tuple[str, ...] = ("drafter",),
    ) -> None:
        """Start with bare roots of ``batch`` sequences, which have ``capacity`` nodes at most.

        ``support`` [Vd] are the target ids of the draft vocabulary, None for the whole one. ``sources`` may propose
        nodes; the first does where ``add`` names nobody.
        """
        self.support = support
        self.sources = sources
        self.capacity = capacity
        self.tokens = torch.full((batch, capacity), -1, device=device)
        self.columns = torch.full((batch, capacity), -1, device=device)
        self.parents = torch.full((batch, capacity), ROOT, device=device)
        self.depths = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        self.sizes = torch.zeros(batch, dtype=torch.int64, device=device)
        self.q: Tensor | None = None  # [B * capacity, K rounded up to whole blocks], filled from above
        self.q_ids: Tensor | None = None  # [B * capacity, K] where distributions are sparse
        self.q_row = torch.full((batch, capacity), -1, device=device)
        self._draw: Tensor | None = None  # [B, capacity] codes, -1 where ``finish`` says it; most trees have one way
        self._source: Tensor | None = None  # [B, capacity], where not all are the first
        self._used = 0
        self._width = 0

    def new_rows(self, count: int, width: int, dtype: torch.dtype, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Make room for M = ``count`` distributions of ``width`` K: their places [M], for ``add``, and the room itself.

        All of a tree are dense, over the draft vocabulary, or sparse, over the target ids ``ids`` [M, K].
        """
        if self.q is None:
            self._width = width
            blocks = -(-width // BLOCK) * BLOCK
            # Not initialised: rows past the last are never read, and a large vocabulary costs only what is used.
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
        """Add node ``level`` to each of the chains ``rows`` [M], named once and ``level`` nodes long; see ``add``."""
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
        """Add one node for each entry of ``rows`` [M] and return the new nodes [M].

        A sequence may occur several times in ``rows``: its nodes are then numbered in this order. ``columns`` [M] are
        the drawn tokens as places of their parents' distributions, which are at the places ``q_row`` [M]; without any,
        as places of the draft vocabulary. ``parents`` [M] are nodes or ROOT, ``draw`` is how they were chosen, None for
        what ``finish`` says, and ``source`` who proposes them, a place of ``sources``.
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
        """The trees as they are now, as wide as the largest of them; ``draw`` is how most nodes were chosen."""
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
