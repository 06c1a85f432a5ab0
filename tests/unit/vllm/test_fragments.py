"""Encoding of fragments as records."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from osd.vllm.sharing import LONGEST, Fragment, decoded, encoded


def test_decoding_restores_the_fragments():
    sent = [Fragment([], [1, 2]), Fragment([4, 5, 6, 7], [8]), Fragment([9], list(range(50)))]
    (record,) = encoded(sent)
    assert decoded(record, 50) == sent


def test_long_fragment_is_split_into_consecutive_pieces():
    whole = [Fragment([1, 2, 3, 4], list(range(10, 2600))), Fragment([5], list(range(7)))]
    records = list(encoded(whole))
    assert all(len(record) <= 4 * LONGEST for record in records)
    pieces = [piece for record in records for piece in decoded(record, 3000)]
    assert pieces.pop() == whole[1]
    assert [token for piece in pieces for token in piece.tokens] == whole[0].tokens
    for before, after in pairwise(pieces):
        assert after.context == before.end


@pytest.mark.parametrize(
    "numbers",
    [[0, 1, 50], [0, 1, -1], [5, 1, 1, 2, 3, 4, 5, 6], [-1, 3, 1, 2], [0, 2, 1], [0, 0], [1], [0, -3, 1], [0] * 2000],
)
def test_damaged_record_has_no_fragments(numbers):
    assert decoded(np.array([0, 1, 7, *numbers], "<i4").tobytes(), 50) == []
    assert decoded(np.array([0, 1, 7, *numbers], "<i4").tobytes()[:-1], 50) == []


def test_empty_input_gives_empty_output():
    assert list(encoded([])) == []
    assert decoded(b"", 50) == []
