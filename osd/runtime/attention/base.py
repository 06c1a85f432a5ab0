"""What a backend of attention is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache


class AttentionBackend(ABC):
    """Attention of the rows of one forward over the slots of a cache; every layer asks the same object.

    What does not change from layer to layer is prepared once: when it is made, or when the first layer asks.
    """

    def __init__(self, rows: PackedRows, cache: KVCache) -> None:
        """Prepare for ``rows``, which are where ``cache`` is."""
        self._rows, self._cache = rows, cache
        self._first: dict[int | None, Tensor] = {}

    @staticmethod
    def fits(rows: PackedRows, cache: KVCache) -> bool:
        """Whether the backend computes these rows on this machine."""
        raise NotImplementedError

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float
    ) -> Tensor:
        """Store the new keys and values of ``layer`` in their slots, and attend.

        query [R, heads, dim]; key and value [R, kv_heads, dim], all of one dtype; ``window`` is how many places a row
        sees, itself included, None for all; ``softcap`` 0 caps no score. Where the rows carry a selection, and see all
        places, they read what it chooses. Returns [R, heads, dim] of the query's dtype.
        """

    def first(self, window: int | None) -> Tensor:
        """[R] int32 the first place that each row sees."""
        if window not in self._first:
            seen = self._rows.visible.new_zeros(()) if window is None else self._rows.positions.int() - (window - 1)
            self._first[window] = seen.clamp_min(0).expand_as(self._rows.visible).contiguous()
        return self._first[window]
