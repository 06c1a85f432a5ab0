"""Attention of a forward's rows over KV slots: one interface, and a backend for each device and kind of forward."""

from __future__ import annotations

from osd.runtime.attention.base import AttentionBackend
from osd.runtime.attention.flash_decoding import FlashDecoding
from osd.runtime.attention.grid import GridAttention
from osd.runtime.attention.native import NativeAttention
from osd.runtime.attention.reference import ReferenceAttention
from osd.runtime.batch import PackedRows
from osd.runtime.kv_cache import KVCache

BACKENDS: dict[str, type[AttentionBackend]] = {
    "flash_decoding": FlashDecoding,
    "grid": GridAttention,
    "native": NativeAttention,
    "reference": ReferenceAttention,
}

__all__ = ["BACKENDS", "AttentionBackend", "prepare"]


def prepare(rows: PackedRows, cache: KVCache) -> AttentionBackend:
    """Return the first backend that fits, prepared for all layers of one forward."""
    return next(backend for backend in BACKENDS.values() if backend.fits(rows, cache))(rows, cache)
