"""What makes one file of another."""

from __future__ import annotations

import numpy as np
import pytest

from osd.registry import delta


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4096, 4099])
def test_what_comes_out_is_what_went_in_whatever_the_size(size: int):
    chance = np.random.default_rng(size)
    data, base = chance.bytes(size), chance.bytes(size)
    assert delta.decode(delta.encode(data, base), base) == data


def test_numbers_that_moved_a_little_take_fewer_bytes():
    base = np.random.default_rng(1).bytes(40_000)
    data = bytearray(base)
    data[::4] = np.random.default_rng(2).bytes(10_000)
    assert len(delta.encode(bytes(data), base)) < 0.3 * len(base)


def test_another_base_makes_something_else():
    assert delta.decode(delta.encode(b"abcdefgh", b"abcdabcd"), b"abcdabce") != b"abcdefgh"


def test_files_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match="8 bytes beside 4"):
        delta.encode(b"abcdefgh", b"abcd")


@pytest.mark.parametrize(
    "bad", [b"", b"no delta", delta.encode(bytes(4), bytes(4)), delta.encode(bytes(12), bytes(12))]
)
def test_what_is_no_delta_for_the_base_is_refused(bad: bytes):
    with pytest.raises(ValueError, match=r"delta|bytes beside"):
        delta.decode(bad, bytes(8))
