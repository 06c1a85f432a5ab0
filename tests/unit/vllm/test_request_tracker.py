"""Requests are recognised by what their rows hold, and their texts have a limit."""

from __future__ import annotations

import numpy as np
import pytest

from osd.recall.backends import backend, text_bytes
from osd.vllm.readers import LEAST_ROOM, Readers, least_bytes


class Rows:
    """Rows of one token more in each call."""

    def __init__(self, readers: Readers, rows: int, length: int = 2048):
        self.readers = readers
        self.ids, self.lengths = np.zeros((rows, length), np.int32), [0] * rows

    def put(self, row: int, tokens):
        self.ids[row, : len(tokens)] = tokens
        self.lengths[row] = len(tokens)

    def call(self, rows=None) -> list[int]:
        """The numbers of the requests in ``rows``, all by default, which then have one token more."""
        self.readers.begin()
        found = []
        for row in range(len(self.lengths)) if rows is None else rows:
            before = self.lengths[row]
            reader = self.readers.of(row, self.ids[row], before, 1)
            assert reader.text.equals(self.ids[row, reader.start : before])
            assert before + 1 - reader.start <= reader.room
            self.ids[row, before] = token = 100 + before
            reader.text.append([token], certain=False)
            reader.end = self.lengths[row] = before + 1
            found.append(reader.number)
        return found


@pytest.fixture
def rows():
    made = Rows(Readers(backend(), 3, least_bytes(8)), 3)
    for row in range(3):
        made.put(row, [row, 5, 6])
    return made


def test_requests_are_the_same_from_call_to_call_and_wherever_they_stand(rows):
    assert rows.call() == rows.call() == [1, 2, 3]
    rows.ids[[0, 2]] = rows.ids[[2, 0]]
    assert rows.call() == [3, 2, 1]
    assert rows.call([1, 0]) == [2, 3], "in any order, and not each in every call"
    assert rows.call() == [3, 2, 1]
    assert len(rows.readers) == 3


@pytest.mark.parametrize("text", [[9, 5, 6, 103], [1, 5, 6, 103, 8, 8]], ids=["as long", "after a whole answer"])
def test_another_text_is_another_request(rows, text):
    rows.call()
    rows.put(1, text)
    assert rows.call() == [1, 4, 3]


def test_equal_texts_are_requests_of_their_own(rows):
    rows.put(1, [0, 5, 6])
    assert sorted(rows.call()) == sorted(rows.call()) == [1, 2, 3]
    assert len(rows.readers) == 3


def test_a_request_that_is_where_another_one_was_is_not_taken_for_it(rows):
    rows.put(0, [5, 6, 102])
    rows.put(1, [5, 6])
    assert rows.call([0, 1]) == [1, 2]
    rows.ids[[0, 1]] = rows.ids[[1, 0]]
    rows.lengths[:2] = rows.lengths[1::-1]
    assert rows.call([0, 1]) == [2, 1], "the first now has the text that the second had before this call"


def test_where_all_places_are_taken_the_request_that_was_not_seen_for_longest_has_ended(rows):
    rows.call()
    rows.call([0, 2])
    rows.put(1, [9, 9])
    assert rows.call([0, 1]) == [1, 4]
    assert len(rows.readers) == 3
    assert rows.call([2]) == [3], "it was only not scheduled"


def test_requests_that_were_not_seen_for_long_have_ended(rows):
    rows.call()
    for _ in range(130):
        rows.call([2])
    assert len(rows.readers) == 1
    assert rows.readers.bytes_used == text_bytes(LEAST_ROOM)


def test_texts_never_need_more_than_their_budget():
    most, budget = 6, least_bytes(6) + text_bytes(1024)
    rows = Rows(Readers(backend(), most, budget), most)
    generator = np.random.default_rng(0)
    for row in range(most):
        rows.put(row, generator.integers(0, 99, 100 + 200 * row))
    numbers = rows.call()
    for _ in range(700):
        assert rows.call() == numbers, "a text for which there is no room goes on with its last half"
        assert rows.readers.bytes_used <= budget
    rows.put(0, [1, 2])
    assert rows.call([0]) == [7]
    assert rows.readers.bytes_used <= budget


def test_a_text_grows_while_there_is_room():
    rows = Rows(Readers(backend(), 2, least_bytes(2) + text_bytes(4096)), 1)
    rows.put(0, [1, 2])
    for _ in range(1500):
        assert rows.call() == [1]
    assert text_bytes(2048) <= rows.readers.bytes_used < text_bytes(4096)
