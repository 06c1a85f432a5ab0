"""Interface of the attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache


class AttentionBackend(ABC):
    """Attention of the rows of one forward over the slots of a cache, shared by all layers.

    Values that are equal for all layers are prepared once, in the constructor or at the first layer.
    """

    def __init__(self, rows: PackedRows, cache: KVCache) -> None:
        """Prepare for ``rows``, which are on the device of ``cache``."""
        self._rows, self._cache = rows, cache
        self._first: dict[int | None, Tensor] = {}

    @staticmethod
    def fits(rows: PackedRows, cache: KVCache) -> bool:
        """Return whether the backend can compute these rows on this machine."""
        raise NotImplementedError

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        """Store the new keys and values of ``layer`` in their slots, and return the attention [R, heads, dim].

        If the rows carry a selection and the layer has no window, they read only the selected places.

        Args:
            layer: number of the decoder layer.
            query: [R, heads, dim].
            key: [R, kv_heads, dim], of the query's dtype.
            value: [R, kv_heads, dim], of the query's dtype.
            scale: factor of the scores.
            window: number of places that a row sees, its own included; None for all.
            softcap: limit of the scores by a hyperbolic tangent; 0 for no limit.

        Returns:
            [R, heads, dim] of the query's dtype.
        """

    def first(self, window: int | None) -> Tensor:
        """Return [R] int32, the first place that each row sees."""
        if window not in self._first:
            seen = self._rows.visible.new_zeros(()) if window is None else self._rows.positions.int() - (window - 1)
            self._first[window] = seen.clamp_min(0).expand_as(self._rows.visible).contiguous()
        return self._first[window]
