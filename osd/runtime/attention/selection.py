"""Which tokens of a long context a layer reads, chosen one by one, and what each layer has chosen so far.

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
    """How many tokens a row reads: the first ``initial``, the last ``local``, and ``top`` chosen ones between them.

    A choice is kept for later queries whose cosine with the one that it was made for is at least ``threshold``. With
    ``compact`` the tokens that are read stand side by side for the rotary embedding, so that no two are farther apart
    than there are tokens, and all candidates are scored as if ``local`` tokens away; else everything stays in its
    place.
    """

    initial: int
    top: int
    local: int
    threshold: float
    compact: bool = False

    @property
    def read(self) -> int:
        """Tokens that a row reads at most, and chooses nothing before there are more."""
        return self.initial + self.top + self.local

    def copied_bytes(self, layers: int, heads: int, places: int, width: int) -> int:
        """Memory of the copies that our kernels keep for a slot of so many places, each of ``width`` bytes."""
        # The heads of a layer lie together.
        return slot_bytes(layers, 1, heads * (self.initial + self.top), width) if places > self.read else 0


@dataclass(frozen=True)
class Far:
    """What the rows of a slot read of the ``places`` [n] before ``begin``, each ``moved`` [n] places nearer."""

    places: Tensor
    begin: int
    moved: Tensor


class TokenSelection:
    """The choices of each layer for each slot of a cache; forwards that carry it read what it chooses.

    All rows of a slot in a forward share one choice, made for their mean query, and must be neighbours. A choice is
    made anew, too, where the local tokens behind it have become half or twice as many.
    """

    def __init__(self, sizes: SelectionSizes, inverse: Tensor, heads: int, cache: KVCache) -> None:
        """Choose nothing yet, for so many ``heads`` of queries.

        By the angles ``inverse`` [head_dim / 2] the rotary embedding turns one place, see ``inverse_frequencies``.
        """
        layers, slots, _, places, dim = cache.keys.shape
        device = cache.keys.device
        self.sizes, self._inverse, self._heads, self._cache = sizes, inverse, heads, cache
        self.counts = torch.zeros(2, dtype=torch.int64)
        """[2] how many choices were made, and how many kept."""
        self._queries = torch.zeros(layers, slots, heads * dim, device=device)
        self.chosen = torch.zeros(layers, slots, sizes.top, dtype=torch.int32, device=device)
        self.begins = torch.zeros(layers, slots, dtype=torch.int32, device=device)
        angles = torch.arange(places, device=device)[:, None] * inverse.float().to(device)
        self._cosines, self._sines = angles.cos(), angles.sin()  # [places, dim / 2]
        self.copies: tuple[Pages, ...] = ()  # for our kernels: a choice is read more often than made
        if device.type == "cpu" and kernels() is not None:
            shape = (layers, slots, cache.keys.shape[2], sizes.initial + sizes.top, dim)
            self.copies = Pages(shape, cache.keys.dtype, device), Pages(shape, cache.keys.dtype, device)
            cache.beside.add(self)

    def forget(self, slot: int) -> None:
        """Choose anew for whatever comes to a slot."""
        self.begins[:, slot] = 0

    def bytes_of(self, places: int) -> int:
        """Memory that the copies of a slot of so many places take at most: none where everything is read."""
        layers, _, heads, _, dim = self._cache.keys.shape
        return self.sizes.copied_bytes(layers, heads, places, dim * self._cache.keys.itemsize)

    def release(self, slot: int, places: int) -> None:
        """Let the system have the copies of a slot that holds so many places, if these are read without a choice."""
        if places > self.sizes.read:
            return
        self.forget(slot)
        for pages in self.copies:
            for layer in pages.tensor[:, slot]:
                pages.release(layer)

    def in_small_pages(self) -> None:
        """Have ``release`` give all of the copies back."""
        for pages in self.copies:
            pages.in_small_pages()

    def resized(self, sizes: SelectionSizes) -> TokenSelection:
        """Another one for the same model and cache, which has chosen nothing."""
        return TokenSelection(sizes, self._inverse, self._heads, self._cache)

    @cached_property
    def native(self) -> structs.Selection:
        """The same for our kernels."""
        sizes = self.sizes
        return structs.Selection(
            sizes.initial, sizes.top, sizes.local, self.begins.shape[1], sizes.threshold, sizes.compact,
            self._queries.data_ptr(), self.chosen.data_ptr(), self.begins.data_ptr(),
            self._cosines.data_ptr(), self._sines.data_ptr(), self.counts.data_ptr(),
            *(copy.tensor.data_ptr() for copy in self.copies),
        )  # fmt: skip

    def far(self, layer: int, slot: int, first: int, queries: Tensor, positions: Tensor, keys: Tensor) -> Far | None:
        """What rows of ``slot`` with ``first`` tokens before them read in ``layer``; None where they read everything.

        ``queries`` [r, heads, dim] are rotated to their ``positions`` [r], and each of ``keys`` [kv_heads, places, dim]
        of the slot to its place.
        """
        sizes = self.sizes
        if first <= sizes.read:
            return None
        mean = self.turned(queries.float(), -positions).mean(0)  # [heads, dim]
        begin, before = int(self.begins[layer, slot]), self._queries[layer, slot]
        window, alike = first - begin, F.cosine_similarity(mean.flatten(), before, 0)
        kept = begin > 0 and sizes.local <= 2 * window and window <= 2 * sizes.local and bool(alike >= sizes.threshold)
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
        """``x`` [n, heads, dim] rotated by ``places`` [n] more places, or back where these are negative."""
        away = places.abs().long()
        cosines, sines = self._cosines[away, None], self._sines[away, None] * places.sign()[:, None, None]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)

    def _votes(self, mean: Tensor, position: int, keys: Tensor) -> Tensor:
        """[n] the sum over all heads of the softmax of their unscaled scores of ``keys`` [kv_heads, n, dim]."""
        sizes = self.sizes
        if sizes.compact:
            places = torch.arange(keys.shape[1], device=keys.device) + sizes.initial
            keys, position = self.turned(keys.transpose(0, 1), -places).transpose(0, 1), sizes.local
        query = self.turned(mean[None], torch.tensor([position], device=keys.device))[0]
        groups = len(mean) // len(keys)  # neighbouring heads share a key head
        return torch.matmul(query.unflatten(0, (-1, groups)), keys.transpose(1, 2)).softmax(-1).sum((0, 1))
