"""Keys and values of every sequence, in slots that never move."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from osd.runtime.grid import Grid


class KVCache:
    """KV slots of one model: ``keys`` and ``values`` are [layers, slots, kv_heads, places, head_dim].

    ``length[slot]`` places of a slot hold committed tokens; what lies beyond is scratch that the next forward may
    overwrite.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        places: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, slots, kv_heads, places, head_dim)
        self.keys, self.values = untouched(shape, dtype, device), untouched(shape, dtype, device)
        self.places = places
        self.length = [0] * slots

    def keep(self, slot: int, start: int, offsets: list[int]) -> None:
        """Keep the scratch entries ``start + offsets`` of a slot, in this order, right behind ``start``.

        ``offsets`` ascend strictly; afterwards the slot holds ``start + len(offsets)`` tokens.
        """
        if offsets != list(range(len(offsets))):
            source = torch.tensor(offsets, device=self.keys.device) + start
            for cache in (self.keys, self.values):
                cache[:, slot, :, start : start + len(offsets)] = cache[:, slot, :, source]
        self.length[slot] = start + len(offsets)

    def copy(self, source: int, slot: int, start: int, count: int) -> None:
        """Continue a slot, which holds ``start`` tokens, by the next ``count`` of another one."""
        places = slice(start, start + count)
        for cache in (self.keys, self.values):
            cache[:, slot, :, places] = cache[:, source, :, places]
        self.length[slot] = start + count

    def check_integrity(self) -> None:
        """Check that no slot claims more than it has.

        Raises:
            AssertionError: a length is out of range.
        """
        assert all(0 <= length <= self.places for length in self.length), self.length  # noqa: S101


def untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory until they are used: PyTorch would write them, the system gives them for nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class PackedRows:
    """The new tokens of all sequences of a forward, one row each, R in all.

    * ``token_ids`` and ``positions`` [R] int64.
    * ``slots`` [R] int32, and ``stores`` [R] int32: the place of the slot that the row's key goes to.
    * ``visible`` [R] int32: the row sees the places before this one.
    * ``base`` [R] int32 and ``mask`` [R, W] bool: in a draft tree it also sees ``base + j`` where
      ``mask[:, j]``. None when no row is in a tree.
    * ``late``: tokens that the host has not read; None when it knows all.
    * ``grid``: where the rows stand for attention over a grid. None until a model lays them out for its device.

    Rows are made on the host, whatever the device of the model.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    stores: Tensor
    visible: Tensor
    base: Tensor | None = None
    mask: Tensor | None = None
    late: Late | None = None
    grid: Grid | None = None

    def settled(self) -> PackedRows:
        """The same with the late tokens in their rows, on the host."""
        if self.late is None:
            return self
        tokens = self.late.over(self.token_ids, self.late.source)
        return replace(self, token_ids=tokens, late=None)


@dataclass(frozen=True)
class Late:
    """Draft tokens [n] int64 on a device; ``source`` [R] int64 on the host says which of them a row has, -1 none."""

    tokens: Tensor
    source: Tensor

    def over(self, known: Tensor, source: Tensor) -> Tensor:
        """``known`` [R] with the late tokens in their rows, where ``source`` is on the device of both."""
        return torch.where(source >= 0, self.tokens[source.clamp(min=0)], known)
