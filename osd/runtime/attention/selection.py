"""Selection of the context tokens that each layer reads, and the cache of the last selections.

Wu et al., "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic Token-Level KV
Cache Selection", EMNLP 2025 (arXiv 2411.02886).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from osd.runtime.kv_cache import KVCache, slot_bytes
from osd.runtime.memory import Pages
from osd.runtime.native import kernels, structs


@dataclass(frozen=True)
class SelectionSizes:
    """Number of tokens that a row reads, and the rule for reusing a selection.

    Attributes:
        initial: tokens at the beginning of the context that are always read.
        top: tokens that are selected from the middle.
        local: tokens at the end of the context that are always read.
        threshold: least cosine of a later query with the selecting query to reuse a selection.
        compact: whether the read tokens get adjacent rotary positions, so that no distance exceeds the number of read
            tokens, and candidates are scored as if ``local`` tokens away. Otherwise all keep their positions.
    """

    initial: int
    top: int
    local: int
    threshold: float
    compact: bool = False

    @property
    def read(self) -> int:
        """Most tokens that a row reads; a shorter context is read whole."""
        return self.initial + self.top + self.local

    def copied_bytes(self, layers: int, heads: int, places: int, width: int) -> int:
        """Return the bytes of our kernels' copies for a slot of ``places`` places, each of ``width`` bytes."""
        # The heads of a layer are contiguous.
        return slot_bytes(layers, 1, heads * (self.initial + self.top), width) if places > self.read else 0


@dataclass(frozen=True)
class Far:
    """Places [n] before ``begin`` that the rows of a slot read, each ``moved`` [n] places nearer."""

    places: Tensor
    begin: int
    moved: Tensor


class TokenSelection:
    """Selections of each layer for each slot of a cache; forwards that carry this object read only selected places.

    The rows of a slot in a forward must be adjacent and share one selection, made for their mean query. A new selection
    is also made when the number of tokens after the last selection is below half or above twice ``sizes.local``.
    """

    def __init__(self, sizes: SelectionSizes, inverse: Tensor, heads: int, cache: KVCache) -> None:
        """Start without selections.

        Args:
            sizes: numbers of tokens to read.
            inverse: [head_dim / 2], the angles by which the rotary embedding turns one place, see
                ``inverse_frequencies``.
            heads: number of query heads.
            cache: KV cache of the model.
        """
        layers, slots, _, places, dim = cache.keys.shape
        device = cache.keys.device
        self.sizes, self._inverse, self._heads, self._cache = sizes, inverse, heads, cache
        self.counts = torch.zeros(2, dtype=torch.int64)  # number of selections made, and reused
        self._queries = torch.zeros(layers, slots, heads * dim, device=device)
        self.chosen = torch.zeros(layers, slots, sizes.top, dtype=torch.int32, device=device)
        self.begins = torch.zeros(layers, slots, dtype=torch.int32, device=device)
        angles = torch.arange(places, device=device)[:, None] * inverse.float().to(device)
        self._cosines, self._sines = angles.cos(), angles.sin()  # [places, dim / 2]
        self.copies: tuple[Pages, ...] = ()  # for our kernels: a selection is read more often than made
        if device.type == "cpu" and kernels() is not None:
            shape = (layers, slots, cache.keys.shape[2], sizes.initial + sizes.top, dim)
            self.copies = Pages(shape, cache.keys.dtype, device), Pages(shape, cache.keys.dtype, device)
            cache.additional.add(self)

    def forget(self, slot: int) -> None:
        """Discard the selections of a slot, before another sequence uses it."""
        self.begins[:, slot] = 0

    def bytes_of(self, places: int) -> int:
        """Return the most bytes of the copies for a slot with ``places`` places; 0 if the context is read whole."""
        layers, _, heads, _, dim = self._cache.keys.shape
        return self.sizes.copied_bytes(layers, heads, places, dim * self._cache.keys.itemsize)

    def release(self, slot: int, places: int) -> None:
        """Free the copies of a slot that holds ``places`` places, if the context is now read whole."""
        if places > self.sizes.read:
            return
        self.forget(slot)
        for pages in self.copies:
            for layer in pages.tensor[:, slot]:
                pages.release(layer)

    def in_small_pages(self) -> None:
        """Use small pages, so that ``release`` can free all of the copies."""
        for pages in self.copies:
            pages.in_small_pages()

    def resized(self, sizes: SelectionSizes) -> TokenSelection:
        """Return an empty selection of other sizes for the same model and cache."""
        return TokenSelection(sizes, self._inverse, self._heads, self._cache)

    @cached_property
    def native(self) -> structs.Selection:
        """C struct for our kernels, with pointers to the tensors of this object."""
        sizes = self.sizes
        return structs.Selection(
            sizes.initial, sizes.top, sizes.local, self.begins.shape[1], sizes.threshold, sizes.compact,
            self._queries.data_ptr(), self.chosen.data_ptr(), self.begins.data_ptr(),
            self._cosines.data_ptr(), self._sines.data_ptr(), self.counts.data_ptr(),
            *(copy.tensor.data_ptr() for copy in self.copies),
        )  # fmt: skip

    def far(self, layer: int, slot: int, first: int, queries: Tensor, positions: Tensor, keys: Tensor) -> Far | None:
        """Return the distant places that rows of a slot read in a layer; None if they read all.

        Args:
            layer: number of the layer.
            slot: of the rows.
            first: number of tokens before the rows.
            queries: [r, heads, dim], rotated to their positions.
            positions: [r].
            keys: [kv_heads, places, dim] of the slot, each rotated to its place.
        """
        sizes = self.sizes
        if first <= sizes.read:
            return None
        mean = self.turned(queries.float(), -positions).mean(0)  # [heads, dim]
        begin, before = int(self.begins[layer, slot]), self._queries[layer, slot]
        window, cosine = first - begin, F.cosine_similarity(mean.flatten(), before, 0)
        kept = begin > 0 and sizes.local <= 2 * window and window <= 2 * sizes.local and bool(cosine >= sizes.threshold)
        self.counts[int(kept)] += 1
        if not kept:
            begin = first - sizes.local
            votes = self._votes(mean, int(positions[0]), keys[:, sizes.initial : begin].float())
            chosen = votes.sort(descending=True, stable=True).indices[: sizes.top].sort().values + sizes.initial
            before.copy_(mean.flatten())
            self.chosen[layer, slot], self.begins[layer, slot] = chosen.int(), begin
        every = torch.arange(sizes.initial + sizes.top, device=keys.device)
        places = torch.cat([every[: sizes.initial], self.chosen[layer, slot].long()])
        moved = begin - len(every) - (places - every) if sizes.compact else torch.zeros_like(every)
        return Far(places, begin, moved)

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        """Return ``x`` [n, heads, dim] rotated by ``places`` [n] places; negative places rotate back."""
        away = places.abs().long()
        cosines, sines = self._cosines[away, None], self._sines[away, None] * places.sign()[:, None, None]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)

    def _votes(self, mean: Tensor, position: int, keys: Tensor) -> Tensor:
        """Return [n], the sum over all heads of the softmax of their unscaled scores of ``keys`` [kv_heads, n, dim]."""
        sizes = self.sizes
        if sizes.compact:
            places = torch.arange(keys.shape[1], device=keys.device) + sizes.initial
            keys, position = self.turned(keys.transpose(0, 1), -places).transpose(0, 1), sizes.local
        query = self.turned(mean[None], torch.tensor([position], device=keys.device))[0]
        groups = len(mean) // len(keys)  # neighbouring heads share a key head
        return torch.matmul(query.unflatten(0, (-1, groups)), keys.transpose(1, 2)).softmax(-1).sum((0, 1))
