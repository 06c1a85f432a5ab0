"""Attention over a grid of sequences, whose shapes depend on sizes that the host knows and on nothing else.

Ragged rows are sorted into cells [B, W], a line for each sequence; the sequences' slots are read up to a common
length, and masks say what a row sees. With sizes rounded up to a few buckets, the same recording serves many forwards:
rows of padding store their keys in the last place of slot 0, which no row sees, and what they compute is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from osd.runtime.kv_cache import KVCache, PackedRows
from osd.runtime.recording import StaticBuffer

_ALIGNED = 64  # places of a slot come in multiples of this: kernels want masks that are aligned
_SHORTEST = 256  # places that attention reads at least; further buckets are twice as long
_FEW = 64  # rows that weights are read for, not computed with; further buckets are its multiples
_ASKED = 16  # rows of logits that a recording has at least, where not all are asked for
_OF_ROWS = ("token_ids", "positions", "slots", "stores", "visible", "base", "source", "where")
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # those that take masks, recorded or not


class Grid:
    """Where the rows of one forward stand; good for that forward, or one recording of it."""

    def __init__(self, cells: Tensor, where: Tensor, owners: Tensor, context: int) -> None:
        """Lay out a grid.

        Args:
            cells: [B, W] int64 the row of each cell, any row for an empty one.
            where: [R] int64 the cell of each row.
            owners: [B] int64 the slot of each line.
            context: places of a slot that are read; no row sees any behind them.
        """
        self._cells, self._where, self._owners, self._context = cells, where, owners, context
        self._biases: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: PackedRows,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        """See ``osd.runtime.attention.attend``; ``window`` is how many places a row sees, None for all."""
        keys[rows.slots, :, rows.stores] = key.to(keys.dtype)
        values[rows.slots, :, rows.stores] = value.to(values.dtype)
        heads, kv_heads = query.shape[1], key.shape[1]
        groups, (count, width) = heads // kv_heads, self._cells.shape
        # Query heads that share a key head become rows, so keys are never copied for them.
        q = query.to(keys.dtype)[self._cells].unflatten(2, (kv_heads, groups))  # [B, W, kv, g, dim]
        q = q.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, groups * width, -1)
        # A slot alone is read where it is; several are copied together first.
        read, theirs = (
            cache[:, :, : self._context] if len(cache) == 1 else cache[:, :, : self._context][self._owners]
            for cache in (keys, values)
        )
        bias = self._bias(rows, window, groups, keys.dtype)
        if softcap:
            scores = torch.matmul(q.float(), read.float().transpose(2, 3)) * scale
            mixed = (softcap * torch.tanh(scores / softcap) + bias).softmax(-1) @ theirs.float()
        else:
            with sdpa_kernel(_KERNELS):
                mixed = F.scaled_dot_product_attention(q, read, theirs, attn_mask=bias, scale=scale)
        mixed = mixed.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4)  # [B, W, kv, g, dim]
        return mixed.reshape(count * width, heads, -1)[self._where].to(query.dtype)

    def _bias(self, rows: PackedRows, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, g * W, context] what is added to scores: 0 where a row sees a place, else so little that it ends at 0.

        It is finite, because kernels that go block by block may not survive a block of minus infinities.
        """
        if (window, groups, dtype) not in self._biases:
            places = torch.arange(self._context, device=rows.visible.device)
            hidden = places >= rows.visible[:, None]  # [R, context]
            if window is not None:
                hidden |= places <= rows.positions[:, None] - window
            if rows.mask is not None and rows.base is not None:
                offset = places - rows.base[:, None]
                last = rows.mask.shape[1] - 1
                hidden &= (offset < 0) | (offset > last) | ~rows.mask.gather(1, offset.clamp(0, last))
            bias = hidden.to(dtype) * (torch.finfo(dtype).min / 2)
            self._biases[window, groups, dtype] = bias[self._cells].repeat(1, groups, 1).unsqueeze(1)
        return self._biases[window, groups, dtype]


@dataclass(frozen=True)
class GridShape:
    """All sizes of a forward: ``wanted`` rows of logits, and trees of ``nodes`` nodes, 0 for none."""

    rows: int
    wanted: int
    sequences: int
    width: int
    context: int
    nodes: int

    @classmethod
    def of(cls, rows: PackedRows, wanted: int, further: int = 0) -> GridShape:
        """As large as the forward needs, and ``further`` places behind it."""
        slots = rows.slots.numpy()
        sees = max(int(rows.visible.max()), int(rows.stores.max()) + 1)
        nodes = 0
        if rows.mask is not None and rows.base is not None:
            nodes = rows.mask.shape[1]
            sees = max(sees, int(rows.base.max()) + nodes)
        counts = np.unique(slots, return_counts=True)[1]
        return cls(len(slots), wanted, len(counts), int(counts.max()), sees + further, nodes)

    def aligned(self, cache: KVCache) -> GridShape:
        """The same, reading places up to the next bucket of them."""
        return GridShape(self.rows, self.wanted, self.sequences, self.width, _context(self.context, cache), self.nodes)

    def bucket(self, cache: KVCache, scratch: int) -> GridShape | None:
        """The sizes of the recording that can do this forward; None where it is larger than drafts are.

        Args:
            cache: whose slots there are.
            scratch: rows that a sequence has at most when its draft of ``scratch`` - 1 tokens is verified.
        """
        slots = len(cache.length)
        if self.width > scratch or self.rows > slots * scratch or self.nodes > scratch:
            return None
        sequences, width = min(power_of_two(self.sequences), slots), min(power_of_two(self.width), scratch)
        # Few rows take as long as one, so that the grid is filled with padding and there are fewer recordings.
        rows = sequences * width if sequences * width <= _FEW else -(-self.rows // _FEW) * _FEW
        return GridShape(
            rows=rows,
            # Of a prompt's rows few are wanted, and logits take much memory.
            wanted=rows if self.wanted == self.rows else min(max(power_of_two(self.wanted), _ASKED), rows),
            sequences=sequences,
            width=width,
            context=_context(self.context, cache),
            nodes=scratch if self.nodes else 0,
        )


def power_of_two(count: int) -> int:
    """The smallest that is not below ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def _context(needed: int, cache: KVCache) -> int:
    return min(max(power_of_two(needed), _SHORTEST), cache.places)


def padded(places: int) -> int:
    """Places of a slot that holds ``places`` and one for padding, the last."""
    return -(-(places + 1) // _ALIGNED) * _ALIGNED


def laid_out(rows: PackedRows, wanted: Tensor, cache: KVCache) -> tuple[PackedRows, Tensor]:
    """Rows and ``wanted`` [n] on the host, brought to the device of ``cache`` as they are, for one forward."""
    buffer = RowBuffer(GridShape.of(rows, len(wanted)).aligned(cache), cache)
    buffer.fill(rows, wanted)
    return buffer.rows, buffer.wanted


class RowBuffer:
    """The rows of a forward on their device, at addresses that stay."""

    def __init__(self, shape: GridShape, cache: KVCache, more: Mapping[str, int] | None = None) -> None:
        """Make room for rows of ``shape`` over the slots of ``cache``, and for ``more`` integers by name."""
        self._shape, self._cache = shape, cache
        integers = dict.fromkeys(_OF_ROWS, shape.rows)
        integers |= {"wanted": shape.wanted, "cells": shape.sequences * shape.width, "owners": shape.sequences}
        self.integers = StaticBuffer(integers | dict(more or {}), shape.rows * shape.nodes, cache.keys.device)

    def fill(self, rows: PackedRows, wanted: Tensor, more: dict[str, np.ndarray] | None = None) -> None:
        """Take in rows on the host; all but the late tokens of ``rows`` arrive with one copy."""
        shape, slots = self._shape, rows.slots.numpy()
        owners, line, counts = np.unique(slots, return_inverse=True, return_counts=True)
        order = line.argsort(kind="stable")
        column = np.empty_like(order)  # how many rows of its sequence come before each row
        column[order] = np.arange(len(slots)) - (counts.cumsum() - counts)[line[order]]
        where = line * shape.width + column
        cells = np.zeros(shape.sequences * shape.width, np.int64)
        cells[where] = np.arange(len(slots))
        nothing = np.empty(0, np.int64)
        base = nothing if rows.base is None else rows.base.numpy()
        source = nothing if rows.late is None else rows.late.source.numpy()
        values = {
            "token_ids": (rows.token_ids.numpy(), 0),
            "positions": (rows.positions.numpy(), 0),
            "slots": (slots, 0),
            "stores": (rows.stores.numpy(), self._cache.places - 1),
            "visible": (rows.visible.numpy(), 1),
            "base": (base, 0),
            "source": (source, -1),
            "where": (where, 0),
            "wanted": (wanted.numpy(), 0),
            "cells": (cells, 0),
            "owners": (owners, 0),
        }
        flags = None
        if rows.mask is not None:
            flags = np.zeros((len(slots), shape.nodes), np.uint8)
            flags[:, : rows.mask.shape[1]] = rows.mask.numpy()
        self.integers.fill(values | {name: (value, 0) for name, value in (more or {}).items()}, flags)
        if rows.late is not None:
            tokens = self.integers["token_ids"]
            tokens.copy_(rows.late.over(tokens, self.integers["source"]))

    @property
    def rows(self) -> PackedRows:
        """The rows with their grid, for one forward or one recording."""
        shape, parts = self._shape, self.integers
        tree = shape.nodes > 0
        return PackedRows(
            token_ids=parts["token_ids"],
            positions=parts["positions"],
            slots=parts["slots"],
            stores=parts["stores"],
            visible=parts["visible"],
            base=parts["base"] if tree else None,
            mask=parts.flags.view(shape.rows, shape.nodes) if tree else None,
            grid=Grid(parts["cells"].view(shape.sequences, -1), parts["where"], parts["owners"], shape.context),
        )

    @property
    def wanted(self) -> Tensor:
        """[wanted] rows whose logits are asked for."""
        return self.integers["wanted"]
