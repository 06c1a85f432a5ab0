"""How the tokens and drafts of a round become rows of one forward."""

from __future__ import annotations

import torch

from osd.engine.group import Group
from osd.engine.piece import Piece
from osd.runtime.kv_cache import Late, PackedRows


def pack(pieces: list[Piece], groups: list[Group]) -> tuple[PackedRows, torch.Tensor]:
    """Put every piece and its draft one below the other, and note in the pieces where.

    Returns:
        The rows, and [n] the rows whose logits are wanted, on the host.
    """
    tokens: list[int] = []
    slots: list[int] = []
    stores: list[int] = []
    positions: list[int] = []
    visible: list[int] = []
    base: list[int] = []
    wanted: list[int] = []
    branching = [(group, group.draft) for group in groups if group.draft is not None and not group.growth.chains]
    trees = {id(piece) for group, _ in branching for piece in group.pieces}
    for piece in pieces:
        s, end, size = piece.sequence, piece.start + piece.count, len(piece.drafted)
        piece.row, piece.logits_row = len(tokens), len(wanted)
        slots += [s.slot] * (piece.count + size)
        tokens += s.tokens[piece.start : end]
        tokens += piece.drafted
        stores += range(piece.start, end + size)
        if id(piece) in trees:
            positions += range(piece.start, end)
            positions += (end - 1 + depth for depth in _depths(piece.parents))
            visible += range(piece.start + 1, end + 1)
            visible += [end] * size
        else:
            positions += range(piece.start, end + size)
            visible += range(piece.start + 1, end + size + 1)
        base += [0] * piece.count + [end] * size
        if piece.ends:
            wanted += range(piece.row + piece.count - 1, len(tokens))
    mask = None
    if trees:
        width = max(draft.tokens.shape[1] for _, draft in branching)
        mask = torch.zeros(len(tokens), width, dtype=torch.bool)
        for group, draft in branching:
            ancestors = draft.ancestors().cpu()  # [B, N, N]
            for b, piece in enumerate(group.pieces):
                first, size = piece.row + piece.count, len(piece.drafted)
                mask[first : first + size, : ancestors.shape[-1]] = ancestors[b, :size]
    narrow = torch.tensor([slots, stores, visible, base], dtype=torch.int32)
    wide = torch.tensor([tokens, positions])
    rows = PackedRows(
        token_ids=wide[0],
        positions=wide[1],
        slots=narrow[0],
        stores=narrow[1],
        visible=narrow[2],
        base=narrow[3] if mask is not None else None,
        mask=mask,
        late=_late(len(tokens), groups),
    )
    return rows, torch.tensor(wanted, dtype=torch.int64)


def _late(rows: int, groups: list[Group]) -> Late | None:
    """The draft tokens that the host has not read, and which of ``rows`` rows they are."""
    late = [(group, group.late.drafted) for group in groups if group.late is not None]
    if not late:
        return None
    source, at = torch.full((rows,), -1, dtype=torch.int64), 0
    for group, drafted in late:
        for b, piece in enumerate(group.pieces):
            first, size = piece.row + piece.count, len(piece.drafted)
            source[first : first + size] = torch.arange(size) + (at + b * drafted.shape[1])
        at += drafted.numel()
    return Late(torch.cat([drafted.flatten() for _, drafted in late]), source)


def _depths(parents: list[int]) -> list[int]:
    """Tokens from the root to each node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
