"""How the tokens and drafts of a round become rows of one forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from osd.runtime.batch import DeviceTokens, PackedRows, RowBuilder


class Feed(NamedTuple):
    """What one sequence feeds: ``tokens`` for its slot from place ``start`` on, then its draft.

    ``parents`` are the nodes that the ``drafted`` ones hang on, -1 for the last of the tokens. ``ends`` asks for the
    logits after that one, and after each node.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    drafted: Sequence[int]
    parents: Sequence[int]
    ends: bool


@dataclass(frozen=True)
class Packed:
    """The rows of one forward.

    ``wanted`` [n] int64 are the rows whose logits are asked for, on the host. Of each feed, ``first`` is the row of its
    first token, and ``logits`` the row of the logits after its last one; those after the draft's nodes follow it.
    """

    rows: PackedRows
    wanted: Tensor
    first: list[int]
    logits: list[int]


def pack(feeds: Sequence[Feed], unread: Iterable[tuple[Sequence[int], Tensor]] = ()) -> Packed:
    """Put every feed and its draft one below the other.

    ``unread`` are drafts that the host has not read: the feeds that they are of, and the tokens [B, levels] on a
    device.
    """
    builder = RowBuilder()
    wanted: list[int] = []
    first: list[int] = []
    logits: list[int] = []
    for slot, start, tokens, drafted, parents, ends in feeds:
        row = builder.tokens(slot, start, tokens)
        first.append(row)
        logits.append(len(wanted))
        if drafted:
            builder.draft(slot, start + len(tokens), drafted, parents)
        if ends:
            wanted += range(row + len(tokens) - 1, len(builder))
    drafts = [
        (ids, [(first[feed] + len(feeds[feed].tokens), len(feeds[feed].drafted)) for feed in members])
        for members, ids in unread
    ]
    rows = builder.build(DeviceTokens.of(len(builder), drafts))
    return Packed(rows, torch.tensor(wanted, dtype=torch.int64), first, logits)
