"""Packing of the tokens and drafts of a decoding step into the rows of one forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from osd.runtime.batch import DeviceTokens, PackedRows, RowBuilder


class SequenceInput(NamedTuple):
    """Input of one sequence: tokens of its slot, and the draft after them.

    ``start`` is the place of the first token. ``parents`` has the parent of each node, -1 for the last of ``tokens``.
    ``ends`` requests the logits after the last of ``tokens`` and after each node.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    drafted: Sequence[int]
    parents: Sequence[int]
    ends: bool


@dataclass(frozen=True)
class PackedStep:
    """Rows of one forward.

    Attributes:
        rows: of all inputs, one after the other.
        wanted: [n] int64 on the host, the rows whose logits are needed.
        first: by input, the row of its first token.
        logits: by input, the row of the logits after its last token; the logits after the draft's nodes follow it.
    """

    rows: PackedRows
    wanted: Tensor
    first: list[int]
    logits: list[int]


def pack(inputs: Sequence[SequenceInput], unread: Iterable[tuple[Sequence[int], Tensor]] = ()) -> PackedStep:
    """Return the rows of all inputs and their drafts, one after the other.

    ``unread`` are drafts that the host has not read: the numbers of their inputs, and tokens [B, levels] on a device.
    """
    builder = RowBuilder()
    wanted: list[int] = []
    first: list[int] = []
    logits: list[int] = []
    for slot, start, tokens, drafted, parents, ends in inputs:
        row = builder.tokens(slot, start, tokens)
        first.append(row)
        logits.append(len(wanted))
        if drafted:
            builder.draft(slot, start + len(tokens), drafted, parents)
        if ends:
            wanted += range(row + len(tokens) - 1, len(builder))
    drafts = [
        (ids, [(first[number] + len(inputs[number].tokens), len(inputs[number].drafted)) for number in members])
        for members, ids in unread
    ]
    rows = builder.build(DeviceTokens.of(len(builder), drafts))
    return PackedStep(rows, torch.tensor(wanted, dtype=torch.int64), first, logits)
