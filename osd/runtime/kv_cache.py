"""Keys and values of all sequences, in slots at fixed addresses."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from osd.runtime.device import to_device
from osd.runtime.memory import PAGE, Pages


class SlotMemory(Protocol):
    """Additional memory for the slots of a cache."""

    def bytes_of(self, places: int) -> int:
        """Return the most bytes that a slot with ``places`` places takes."""
        ...

    def release(self, slot: int, places: int) -> None:
        """Release the memory that a slot with ``places`` places does not need."""
        ...

    def in_small_pages(self) -> None:
        """Use small pages, so that ``release`` can release all of the memory."""
        ...


class KVCache:
    """KV slots of one model: ``keys`` and ``values`` are [layers, slots, kv_heads, places, head_dim].

    The first ``length[slot]`` places of a slot hold committed tokens; later places are scratch that the next forward
    may overwrite. On a CPU a place takes memory when it is written, and ``clear`` returns the memory to the system.
    The set ``additional`` holds weak references to further memory of the same slots.
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
        self._pages = Pages(shape, dtype, device), Pages(shape, dtype, device)
        self.keys, self.values = (pages.tensor for pages in self._pages)
        self.places = places
        self.additional: WeakSet[SlotMemory] = WeakSet()
        self.length = [0] * slots

    def store(self, layer: int, slots: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` [R, kv_heads, dim] of a layer at ``places`` [R] of ``slots`` [R]."""
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache[slots, :, places] = new.to(cache.dtype)

    def keep(self, slot: int, start: int, offsets: list[int]) -> None:
        """Move the scratch entries ``start + offsets`` of a slot, in this order, to the places from ``start`` on.

        ``offsets`` ascend strictly. Afterwards the slot holds ``start + len(offsets)`` tokens.
        """
        if offsets != list(range(len(offsets))):
            source = to_device([start + offset for offset in offsets], self.keys.device)
            for cache in (self.keys, self.values):
                cache[:, slot, :, start : start + len(offsets)] = cache[:, slot, :, source]
        self.length[slot] = start + len(offsets)

    def move(self, slot: int, source: list[int], places: list[int], first: int, stop: int) -> None:
        """Copy the scratch entries ``source`` of a slot to ``places``, in the layers ``first`` to ``stop`` only."""
        for cache in (self.keys, self.values):
            part = cache[first:stop, slot]
            part[:, :, places] = part[:, :, source]

    def copy(self, source: int, slot: int, start: int, count: int) -> None:
        """Append to a slot with ``start`` tokens the next ``count`` tokens of the slot ``source``."""
        places = slice(start, start + count)
        for cache in (self.keys, self.values):
            cache[:, slot, :, places] = cache[:, source, :, places]
        self.length[slot] = start + count

    def touch(self, slot: int, places: int) -> None:
        """Allocate memory for the first ``places`` places of an empty slot."""
        for cache in (self.keys, self.values):
            cache[:, slot, :, :places] = 0

    def clear(self, slot: int, start: int = 0) -> None:
        """Drop the entries of a slot from the place ``start`` on, and release their memory."""
        self.length[slot] = min(self.length[slot], start)
        for pages in self._pages:
            for layer in pages.tensor[:, slot]:
                for head in layer:
                    pages.release(head[start:])
        for memory in self.additional:
            memory.release(slot, start)

    def in_small_pages(self) -> None:
        """Use small pages, so that places take no more memory than ``bytes_of`` and ``clear`` can release all of it."""
        for part in (*self._pages, *self.additional):
            part.in_small_pages()

    def bytes_of(self, places: int) -> int:
        """Return the most bytes that the first ``places`` places of a slot take."""
        layers, _, heads, _, dim = self.keys.shape
        cached = slot_bytes(layers, heads, places, dim * self.keys.itemsize)
        return cached + sum(memory.bytes_of(places) for memory in self.additional)


def slot_bytes(layers: int, heads: int, places: int, width: int) -> int:
    """Return the most bytes of keys and values for ``places`` places of a slot, each of ``width`` bytes per head."""
    # The places of each head are contiguous, and may begin and end within a page.
    pages = -(-places * width // PAGE) + 1 if places else 0
    return 2 * layers * heads * pages * PAGE


def places_within(layers: int, heads: int, memory: int, width: int) -> int:
    """Return how many places of a slot ``memory`` bytes hold, counted as ``slot_bytes`` does."""
    pages = memory // (2 * layers * heads * PAGE)
    return max(pages - 1, 0) * PAGE // width


def heads_of(config: Any) -> tuple[int, int]:
    """Return the number of key-value heads in each layer and their width, from a model's configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
