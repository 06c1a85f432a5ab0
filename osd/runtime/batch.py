"""Rows of a forward: built on the host, and laid out on the device of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from osd.runtime.kv_cache import KVCache

if TYPE_CHECKING:
    from osd.runtime.attention.selection import TokenSelection

_ALIGNED = 64  # places of a slot are a multiple of this, as kernels need aligned masks
_SHORTEST = 256  # least places that attention reads; further buckets double it
_FEW = 64  # rows up to which reading the weights bounds a forward; further buckets are its multiples
_LEAST_LOGITS = 16  # least rows of logits of a CUDA graph, if not all rows need logits
TENSORS = ("token_ids", "positions", "slots", "stores", "visible", "base", "mask")
_ROW_FIELDS = ("token_ids", "positions", "slots", "stores", "visible", "base", "source", "where")


@dataclass(frozen=True)
class PackedRows:
    """New tokens of all sequences of a forward, one row each, R in all.

    A ``RowBuilder`` makes them on the host, a ``RowBuffer`` on the device of a model.

    Attributes:
        token_ids: [R] int64.
        positions: [R] int64.
        slots: [R] int32.
        stores: [R] int32, the place of the slot that receives the row's key.
        visible: [R] int32; the row sees the places before this one.
        base: [R] int32; in a draft tree the row also sees ``base + j`` where ``mask[:, j]``. None if no row needs it.
        mask: [R, W] bool, see ``base``.
        unread: tokens that the host has not read; None if it knows all.
        grid: cells of the rows for attention over a grid; None until the rows are laid out on a device.
        embedded: [K, hidden] on the model's device, inputs for the ids after its vocabulary, the first id for the first
            row. None if all rows are tokens.
        selection: selects the places of long contexts that the rows read; None if they read all they see.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    stores: Tensor
    visible: Tensor
    base: Tensor | None = None
    mask: Tensor | None = None
    unread: DeviceTokens | None = None
    grid: Grid | None = None
    embedded: Tensor | None = None
    selection: TokenSelection | None = None

    def settled(self) -> PackedRows:
        """Return the same rows on the host with the unread tokens filled in."""
        if self.unread is None:
            return self
        return replace(self, token_ids=self.unread.over(self.token_ids, self.unread.source), unread=None)

    def select(self, rows: Tensor) -> PackedRows:
        """Return only ``rows`` [n] of the rows on the host; all that they see must be in their slots or among them."""
        parts = {name: getattr(self, name) for name in TENSORS}
        chosen = {name: None if part is None else part[rows] for name, part in parts.items()}
        unread = None if self.unread is None else replace(self.unread, source=self.unread.source[rows])
        return replace(self, **chosen, unread=unread)


@dataclass(frozen=True)
class DeviceTokens:
    """Draft tokens on a device that the host has not read.

    Attributes:
        tokens: [n] int64 on the device.
        source: [R] int64 on the host, the index of each row's token, -1 for none.
    """

    tokens: Tensor
    source: Tensor

    @classmethod
    def of(cls, rows: int, drafts: Iterable[tuple[Tensor, Iterable[tuple[int, int]]]]) -> DeviceTokens | None:
        """Return the unread tokens of a forward of ``rows`` rows; None if there are none.

        Args:
            rows: number of rows of the forward.
            drafts: pairs of tokens [B, levels] and, for each of the B sequences, the row of its first token and their
                number.
        """
        source, parts, at = np.full(rows, -1), [], 0
        for tokens, spans in drafts:
            levels = tokens.shape[1]
            for index, (first, size) in enumerate(spans):
                source[first : first + size] = np.arange(size) + (at + index * levels)
            parts.append(tokens.flatten())
            at += tokens.numel()
        return cls(torch.cat(parts), torch.from_numpy(source)) if parts else None

    def over(self, known: Tensor, source: Tensor) -> Tensor:
        """Return ``known`` [R] with the unread tokens filled in; ``source`` is on the device of both."""
        return torch.where(source >= 0, self.tokens[source.clamp(min=0)], known)


@dataclass(frozen=True)
class Grid:
    """Rows arranged in cells [B, W], a line for each sequence, on the device of a model.

    Attributes:
        cells: [B, W] int64, the row of each cell, any row for an empty cell.
        where: [R] int64, the cell of each row.
        owners: [B] int64, the slot of each line.
        context: places of a slot that are read; no row sees a later one.
        all_slots: whether line b is slot b; the line of an idle slot is empty.
    """

    cells: Tensor
    where: Tensor
    owners: Tensor
    context: int
    all_slots: bool = False


class RowBuilder:
    """Builder of a forward's rows on the host, sequence by sequence.

    A draft node whose ancestors are all the nodes before it is an ordinary row; other nodes need a mask.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._stores: list[int] = []
        self._visible: list[int] = []
        self._masked: list[tuple[int, int, int]] = []  # row, first place of its tree, bits of its path

    def __len__(self) -> int:
        """Return the number of rows so far."""
        return len(self._tokens)

    def tokens(self, slot: int, start: int, tokens: Sequence[int], seen: int | None = None) -> int:
        """Append consecutive tokens from place ``start`` on, and return the row of the first.

        Each token sees the places before it and itself, or all places before ``seen``.
        """
        row, end = len(self._tokens), start + len(tokens)
        self._tokens += tokens
        self._slots += [slot] * len(tokens)
        self._positions += range(start, end)
        self._stores += range(start, end)
        self._visible += range(start + 1, end + 1) if seen is None else [seen] * len(tokens)
        return row

    def draft(self, slot: int, start: int, tokens: Sequence[int], parents: Sequence[int]) -> int:
        """Append a draft whose node i has the place ``start + i``, and return the row of the first.

        ``parents`` are the nodes' parents, -1 for the token before ``start``.
        """
        if all(parent + 1 == node for node, parent in enumerate(parents)):
            return self.tokens(slot, start, tokens)
        row = len(self._tokens)
        for node, path in enumerate(paths(parents)):
            self.node(slot, start, node, tokens[node], path)
        return row

    def node(self, slot: int, start: int, node: int, token: int, path: int, sees: int | None = None) -> int:
        """Append one node of a draft and return its row.

        Args:
            slot: of the sequence.
            start: first place of the draft.
            node: number of the node.
            token: its id.
            path: bits of its path, as ``paths`` returns them.
            sees: bits of the nodes that it sees, None for its path.
        """
        row, sees = len(self._tokens), path if sees is None else sees
        alone = sees & (sees + 1) == 0  # it sees exactly the first nodes
        if not alone:
            self._masked.append((row, start, sees))
        self._tokens.append(token)
        self._slots.append(slot)
        self._stores.append(start + node)
        self._positions.append(start + path.bit_count() - 1)
        self._visible.append(start + sees.bit_length() if alone else start)
        return row

    def build(self, unread: DeviceTokens | None = None) -> PackedRows:
        """Return the rows so far; ``unread`` are the draft tokens that are still on a device, None for none."""
        wide = torch.from_numpy(np.array([self._tokens, self._positions], np.int64))
        narrow = torch.from_numpy(np.array([self._slots, self._stores, self._visible], np.int32))
        base, mask = self._mask() if self._masked else (None, None)
        return PackedRows(wide[0], wide[1], narrow[0], narrow[1], narrow[2], base, mask, unread)

    def _mask(self) -> tuple[Tensor, Tensor]:
        rows, bases, ancestors = zip(*self._masked, strict=True)
        width = max(path.bit_length() for path in ancestors)
        stride = (width + 7) // 8
        bits = np.zeros((len(self._tokens), stride), np.uint8)
        packed = b"".join(path.to_bytes(stride, "little") for path in ancestors)
        chosen = list(rows)
        bits[chosen] = np.frombuffer(packed, np.uint8).reshape(-1, stride)
        base = np.zeros(len(bits), np.int32)
        base[chosen] = bases
        mask = np.unpackbits(bits, axis=1, count=width, bitorder="little").view(np.bool_)
        return torch.from_numpy(base), torch.from_numpy(mask)


def paths(parents: Iterable[int], known: Sequence[int] = ()) -> list[int]:
    """Return the path of each node, itself included, as an integer with one bit per node.

    Args:
        parents: the nodes' parents, -1 for the root.
        known: paths of the first nodes of the tree, which are not returned.
    """
    bits = [*known]
    for parent in parents:
        bits.append(1 << len(bits) | (bits[parent] if parent >= 0 else 0))
    return bits[len(known) :]


def consecutive_rows(slot: int, start: int, tokens: Sequence[int]) -> PackedRows:
    """Return the rows of one sequence: consecutive ``tokens`` from place ``start`` on."""
    builder = RowBuilder()
    builder.tokens(slot, start, tokens)
    return builder.build()


@dataclass(frozen=True)
class GridShape:
    """Sizes of a forward: ``wanted`` rows of logits, and draft trees of ``nodes`` nodes, 0 for none."""

    rows: int
    wanted: int
    sequences: int
    width: int
    context: int
    nodes: int

    @classmethod
    def of(cls, rows: PackedRows, wanted: int, further: int = 0) -> GridShape:
        """Return the sizes that a forward needs, with ``further`` places more."""
        # NumPy's functions take a fraction of the time of PyTorch's for a few numbers.
        sees, nodes = max(rows.visible.numpy().max(), rows.stores.numpy().max() + 1), 0
        if rows.mask is not None and rows.base is not None:
            nodes = rows.mask.shape[1]
            sees = max(sees, rows.base.numpy().max() + nodes)
        counts = np.bincount(rows.slots.numpy())
        width, sequences = int(counts.max()), int(np.count_nonzero(counts))
        return cls(len(rows.slots), wanted, sequences, width, int(sees) + further, nodes)

    def aligned(self, cache: KVCache) -> GridShape:
        """Return the same sizes with the context rounded up to the next bucket."""
        return GridShape(self.rows, self.wanted, self.sequences, self.width, _context(self.context, cache), self.nodes)

    def bucket(self, cache: KVCache, scratch: int) -> GridShape | None:
        """Return the sizes of the CUDA graph for this forward; None if it is larger than drafts are.

        A sequence has at most ``scratch`` rows, when its draft of ``scratch`` - 1 tokens is verified.
        """
        slots = len(cache.length)
        if self.width > scratch or self.rows > slots * scratch or self.nodes > scratch:
            return None
        sequences, width = min(power_of_two(self.sequences), slots), min(power_of_two(self.width), scratch)
        # A few rows take as long as one row, so padding the grid costs nothing and saves graphs.
        rows = sequences * width if sequences * width <= _FEW else -(-self.rows // _FEW) * _FEW
        return GridShape(
            rows=rows,
            # A prompt needs logits of few rows, and logits take much memory.
            wanted=rows if self.wanted == self.rows else min(max(power_of_two(self.wanted), _LEAST_LOGITS), rows),
            sequences=sequences,
            width=width,
            context=_context(self.context, cache),
            nodes=scratch if self.nodes else 0,
        )


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def _context(needed: int, cache: KVCache) -> int:
    return min(max(power_of_two(needed), _SHORTEST), cache.places)


def padded_places(places: int) -> int:
    """Return the places of a slot that holds ``places`` places and a last one for padding."""
    return -(-(places + 1) // _ALIGNED) * _ALIGNED


def laid_out(rows: PackedRows, wanted: Tensor, cache: KVCache) -> tuple[PackedRows, Tensor]:
    """Return rows and ``wanted`` [n] of the host on the device of ``cache``, at their own size, for one forward."""
    buffer = RowBuffer(GridShape.of(rows, len(wanted)).aligned(cache), cache)
    buffer.fill(rows, wanted)
    return replace(buffer.rows, selection=rows.selection), buffer.wanted


class RowBuffer:
    """Rows of a forward on their device, at fixed addresses.

    Padding rows store their keys in the last place of slot 0, which no row sees; their results are dropped.
    """

    def __init__(self, shape: GridShape, cache: KVCache, more: Mapping[str, int] | None = None) -> None:
        """Allocate rows of ``shape`` over the slots of ``cache``, and ``more`` integers by name."""
        self._shape, self._cache = shape, cache
        self._all_slots = shape.sequences == len(cache.length)
        integers = dict.fromkeys(_ROW_FIELDS, shape.rows)
        integers |= {"wanted": shape.wanted, "cells": shape.sequences * shape.width, "owners": shape.sequences}
        self.integers = StaticBuffer(integers | dict(more or {}), shape.rows * shape.nodes, cache.keys.device)

    def fill(self, rows: PackedRows, wanted: Tensor, more: dict[str, np.ndarray] | None = None) -> None:
        """Fill in rows of the host with a single copy; only the unread tokens of ``rows`` are on the device already."""
        shape, slots = self._shape, rows.slots.numpy()
        counts = np.bincount(slots, minlength=shape.sequences if self._all_slots else 0)
        if self._all_slots:
            owners, line = np.arange(shape.sequences), slots.astype(np.int64)
        else:
            (owners,) = counts.nonzero()
            line, counts = (counts > 0).cumsum()[slots] - 1, counts[owners]
        order = line.argsort(kind="stable")
        number = np.arange(len(slots))
        column = np.empty_like(order)  # index of each row within its sequence
        column[order] = number - (counts.cumsum() - counts)[line[order]]
        where = line * shape.width + column
        cells = np.zeros(shape.sequences * shape.width, np.int64)
        cells[where] = number
        empty = np.empty(0, np.int64)
        base = empty if rows.base is None else rows.base.numpy()
        source = empty if rows.unread is None else rows.unread.source.numpy()
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
        if rows.unread is not None:
            tokens = self.integers["token_ids"]
            tokens.copy_(rows.unread.over(tokens, self.integers["source"]))

    @property
    def rows(self) -> PackedRows:
        """Rows with their grid, for one forward or one CUDA graph."""
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
            grid=Grid(
                parts["cells"].view(shape.sequences, -1),
                parts["where"],
                parts["owners"],
                shape.context,
                self._all_slots,
            ),
        )

    @property
    def wanted(self) -> Tensor:
        """[wanted] indices of the rows that need logits."""
        return self.integers["wanted"]

    def next_rows(self, tokens: Tensor, slots: Tensor, places: Tensor, live: Tensor) -> PackedRows:
        """Return rows for one more token of each of B sequences; all arguments are on the device.

        Args:
            tokens: [B].
            slots: [B].
            places: [B].
            live: [B]; the other sequences store at the padding place and see one place.
        """
        places = torch.where(live, places, 0)
        every = torch.arange(len(tokens), device=tokens.device)
        return PackedRows(
            token_ids=tokens,
            positions=places,
            slots=slots,
            stores=torch.where(live, places, self._cache.places - 1),
            visible=places + 1,
            grid=Grid(every[:, None], every, slots, self._shape.context),
        )


class StaticBuffer:
    """Integers and flags of one call at fixed addresses, filled from the host with one copy that is not waited for.

    The integers of each name start at a multiple of 16 bytes. Triton compiles a kernel for each combination of aligned
    and unaligned addresses, and a request would wait seconds for it.
    """

    def __init__(self, integers: Mapping[str, int], flags: int, device: torch.device) -> None:
        """Allocate [count] int64 by name, and ``flags`` bytes."""
        self._device = device
        self._spans: dict[str, slice] = {}
        self._words = 0
        for name, size in integers.items():
            self._spans[name] = slice(self._words, self._words + size)
            self._words += size + size % 2
        self._bytes = torch.zeros(8 * self._words + flags, dtype=torch.uint8, device=device)
        words = self._bytes[: 8 * self._words].view(torch.int64)
        self._views = {name: words[span] for name, span in self._spans.items()}
        self.flags = self._bytes[8 * self._words :].view(torch.bool)

    def __getitem__(self, name: str) -> Tensor:
        """Return the integers of a name."""
        return self._views[name]

    def fill(self, integers: Mapping[str, tuple[np.ndarray, int]], flags: np.ndarray | None = None) -> None:
        """Copy the values of every name, padded with a number of its own, and the flags, padded with 0."""
        # PyTorch does not reuse pinned memory before the copies from it are done.
        host = torch.empty(self._bytes.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        raw = host.numpy()
        words = raw[: 8 * self._words].view(np.int64)
        for name, span in self._spans.items():
            values, padding = integers[name]
            words[span][: len(values)] = values
            words[span][len(values) :] = padding
        rest = raw[8 * self._words :]
        rest[:] = 0
        if flags is not None:
            rest[: flags.size] = flags.reshape(-1)
        self._bytes.copy_(host, non_blocking=True)
