"""Differences between files of weights."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest

from osd.registry import delta


def test_delta_that_unpacks_without_end_fills_no_memory():
    base = bytes(4000)
    bomb = zlib.compress(bytes(64 << 20))
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="4001 bytes do not fit a base of 4000 bytes"):
            delta.decode(bomb, base)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert delta.decode(delta.encode(b"x" * 4000, base), base) == b"x" * 4000
