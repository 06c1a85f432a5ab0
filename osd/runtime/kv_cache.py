"""Keys and values of every sequence, in slots that never move."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from osd.runtime.device import sent
from osd.runtime.memory import PAGE, Pages


class SlotMemory(Protocol):
    """Memory that something else takes for the slots of a cache, beside its keys and values."""

    def bytes_of(self, places: int) -> int:
        """Return the bytes that a slot takes at most while it holds so many places."""
        ...

    def release(self, slot: int, places: int) -> None:
        """Give the system the memory that a slot with so many places does not need."""
        ...

    def in_small_pages(self) -> None:
        """Have ``release`` give all of it back."""
        ...


class KVCache:
    """KV slots of one model: ``keys`` and ``values`` are [layers, slots, kv_heads, places, head_dim].

    ``length[slot]`` places of a slot hold committed tokens; what lies beyond is scratch that the next forward may
    overwrite. On a CPU places take memory when they are written, and ``clear`` gives it back. ``beside`` holds weak
    references to further memory for the same slots.
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
        self.beside: WeakSet[SlotMemory] = WeakSet()
        self.length = [0] * slots

    def store(self, layer: int, slots: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` [R, kv_heads, dim] of a layer to ``places`` [R] of ``slots`` [R]."""
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache[slots, :, places] = new.to(cache.dtype)

    def keep(self, slot: int, start: int, offsets: list[int]) -> None:
        """Keep the scratch entries ``start + offsets`` of a slot, in this order, right behind ``start``.

        ``offsets`` ascend strictly; afterwards the slot holds ``start + len(offsets)`` tokens.
        """
        if offsets != list(range(len(offsets))):
            source = sent([start + offset for offset in offsets], self.keys.device)
            for cache in (self.keys, self.values):
                cache[:, slot, :, start : start + len(offsets)] = cache[:, slot, :, source]
        self.length[slot] = start + len(offsets)

    def move(self, slot: int, source: list[int], places: list[int], first: int, stop: int) -> None:
        """Put the scratch entries ``source`` of a slot to ``places``, in the layers ``first`` to ``stop`` only."""
        for cache in (self.keys, self.values):
            part = cache[first:stop, slot]
            part[:, :, places] = part[:, :, source]

    def copy(self, source: int, slot: int, start: int, count: int) -> None:
        """Continue a slot, which holds ``start`` tokens, by the next ``count`` of another one."""
        places = slice(start, start + count)
        for cache in (self.keys, self.values):
            cache[:, slot, :, places] = cache[:, source, :, places]
        self.length[slot] = start + count

    def touch(self, slot: int, places: int) -> None:
        """Have memory for the first so many places of a slot that holds nothing."""
        for cache in (self.keys, self.values):
            cache[:, slot, :, :places] = 0

    def clear(self, slot: int, start: int = 0) -> None:
        """Hold nothing of a slot from the place ``start`` on, and let the system have that memory."""
        self.length[slot] = min(self.length[slot], start)
        for pages in self._pages:
            for layer in pages.tensor[:, slot]:
                for head in layer:
                    pages.release(head[start:])
        for one in self.beside:
            one.release(slot, start)

    def in_small_pages(self) -> None:
        """Have places take no more memory than ``bytes_of`` says, and ``clear`` give all of it back."""
        for part in (*self._pages, *self.beside):
            part.in_small_pages()

    def bytes_of(self, places: int) -> int:
        """Memory that the first so many places of one slot take at most."""
        layers, _, heads, _, dim = self.keys.shape
        own = slot_bytes(layers, heads, places, dim * self.keys.itemsize)
        return own + sum(one.bytes_of(places) for one in self.beside)


def slot_bytes(layers: int, heads: int, places: int, width: int) -> int:
    """Memory of the keys and values of so many places of one slot at most, each of ``width`` bytes."""
    # The places of each head lie together, and need not begin and end with a page.
    pages = -(-places * width // PAGE) + 1 if places else 0
    return 2 * layers * heads * pages * PAGE


def heads_of(config: Any) -> tuple[int, int]:
    """How many heads of keys and values each layer of a model has, and how wide one is, by its configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
