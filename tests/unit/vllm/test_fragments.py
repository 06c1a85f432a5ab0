"""Pieces of texts travel whole, and what is damaged is none."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from osd.vllm.sharing import LONGEST, Fragment, decoded, encoded


def test_fragments_arrive_as_they_were():
    sent = [Fragment([], [1, 2]), Fragment([4, 5, 6, 7], [8]), Fragment([9], list(range(50)))]
    (record,) = encoded(sent)
    assert decoded(record, 50) == sent


def test_long_ones_arrive_in_pieces_of_which_each_goes_on_from_the_one_before():
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
def test_a_record_of_something_else_holds_nothing(numbers):
    assert decoded(np.array([0, 1, 7, *numbers], "<i4").tobytes(), 50) == []
    assert decoded(np.array([0, 1, 7, *numbers], "<i4").tobytes()[:-1], 50) == []


def test_nothing_is_nothing():
    assert list(encoded([])) == []
    assert decoded(b"", 50) == []
