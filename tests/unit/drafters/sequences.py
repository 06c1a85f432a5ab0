"""Random sequences, as batches to unroll on and as trees to expand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from osd.drafters.session import Session
from osd.speculation.tree import ROOT, TreeBuilder


@dataclass
class Sequences:
    token_ids: Tensor
    lengths: Tensor
    hidden: Tensor | None
    sequence: Tensor
    place: Tensor
    completes: Tensor


def at_places(token_ids: Tensor, hidden: Tensor | None, places: list[tuple[int, int]]) -> Sequences:
    """All rows in full, to be predicted at the ``(row, place)`` given."""
    lengths = torch.full((len(token_ids),), token_ids.shape[1])
    rows, where = torch.tensor(places).T
    return Sequences(token_ids, lengths, hidden, rows, where, torch.zeros(len(token_ids), dtype=torch.bool))


def expand_chain(session: Session, slots: list[int], drafted: Tensor) -> list[Tensor]:
    """Logits [B, draft vocabulary] after each of 0, 1, .. tokens of the chains ``drafted`` [B, depth]."""
    columns = drafted if session.support is None else torch.searchsorted(session.support, drafted)
    builder = TreeBuilder(len(slots), drafted.shape[1] + 1, session.support)
    rows, zeros = torch.arange(len(slots)), torch.zeros(len(slots), dtype=torch.int64)
    result = [session.expand(slots, builder, rows, zeros + ROOT)]
    for depth in range(drafted.shape[1]):
        builder.add(rows, zeros + depth - 1, columns[:, depth], zeros)
        result.append(session.expand(slots, builder, rows, zeros + depth))
    return result


def expand_tree(session: Session, slot: int, drafted: list[int], parents: list[int]) -> Tensor:
    """Logits [1 + n, draft vocabulary] after the root and after each node of a tree, level by level."""
    support = session.support
    builder = TreeBuilder(1, len(drafted), support)
    zero = torch.zeros(1, dtype=torch.int64)
    depths = [0] * len(drafted)
    for node, parent in enumerate(parents):
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
        column = torch.tensor([drafted[node]])
        column = column if support is None else torch.searchsorted(support, column)
        builder.add(zero, torch.tensor([parent]), column, zero)
    result = [session.expand([slot], builder, zero, zero + ROOT)]
    order = sorted(range(len(drafted)), key=lambda node: (depths[node], node))
    for depth in sorted(set(depths)):
        level = torch.tensor([node for node in order if depths[node] == depth])
        result.append(session.expand([slot], builder, torch.zeros_like(level), level))
    found = torch.cat(result)
    return found[[0] + [1 + order.index(node) for node in range(len(drafted))]]
