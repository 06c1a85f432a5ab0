"""Keys and values of every sequence, in slots that never move."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


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

    def move(self, slot: int, source: list[int], places: list[int], layers: range) -> None:
        """Put the scratch entries ``source`` of a slot to ``places``, in ``layers`` only, which are neighbours."""
        for cache in (self.keys, self.values):
            part = cache[layers.start : layers.stop, slot]
            part[:, :, places] = part[:, :, source]

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
