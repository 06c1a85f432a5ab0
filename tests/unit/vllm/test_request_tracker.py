"""Assignment of rows to requests, and the memory limit of their texts."""

from __future__ import annotations

import numpy as np
import pytest

from osd.recall.backends import backend, text_bytes
from osd.vllm.request_tracker import LEAST_ROOM, RequestTracker, least_bytes


class Rows:
    """Rows that grow by a token in each call."""

    def __init__(self, tracker: RequestTracker, rows: int, length: int = 2048):
        self.tracker = tracker
        self.ids, self.lengths = np.zeros((rows, length), np.int32), [0] * rows

    def put(self, row: int, tokens):
        self.ids[row, : len(tokens)] = tokens
        self.lengths[row] = len(tokens)

    def call(self, rows=None) -> list[int]:
        """Return the numbers of the requests in ``rows``, by default all, and add a token to each row."""
        self.tracker.begin()
        numbers = []
        for row in range(len(self.lengths)) if rows is None else rows:
            before = self.lengths[row]
            request = self.tracker.of(row, self.ids[row], before, 1)
            assert request.text.equals(self.ids[row, request.start : before])
            assert before + 1 - request.start <= request.room
            self.ids[row, before] = token = 100 + before
            request.text.append([token], certain=False)
            request.end = self.lengths[row] = before + 1
            numbers.append(request.number)
        return numbers


@pytest.fixture
def rows():
    rows = Rows(RequestTracker(backend(), 3, least_bytes(8)), 3)
    for row in range(3):
        rows.put(row, [row, 5, 6])
    return rows


def test_request_keeps_its_number_when_rows_move(rows):
    assert rows.call() == rows.call() == [1, 2, 3]
    rows.ids[[0, 2]] = rows.ids[[2, 0]]
    assert rows.call() == [3, 2, 1]
    assert rows.call([1, 0]) == [2, 3], "rows may come in any order and may be missing"
    assert rows.call() == [3, 2, 1]
    assert len(rows.tracker) == 3


@pytest.mark.parametrize("text", [[9, 5, 6, 103], [1, 5, 6, 103, 8, 8]], ids=["as long", "after a whole answer"])
def test_row_with_another_text_is_a_new_request(rows, text):
    rows.call()
    rows.put(1, text)
    assert rows.call() == [1, 4, 3]


def test_equal_texts_are_separate_requests(rows):
    rows.put(1, [0, 5, 6])
    assert sorted(rows.call()) == sorted(rows.call()) == [1, 2, 3]
    assert len(rows.tracker) == 3


def test_swapped_rows_with_shifted_texts_keep_their_requests(rows):
    rows.put(0, [5, 6, 102])
    rows.put(1, [5, 6])
    assert rows.call([0, 1]) == [1, 2]
    rows.ids[[0, 1]] = rows.ids[[1, 0]]
    rows.lengths[:2] = rows.lengths[1::-1]
    assert rows.call([0, 1]) == [2, 1], "the first row has the text that the second row had before this call"


def test_new_request_ends_the_least_recently_seen_request(rows):
    rows.call()
    rows.call([0, 2])
    rows.put(1, [9, 9])
    assert rows.call([0, 1]) == [1, 4]
    assert len(rows.tracker) == 3
    assert rows.call([2]) == [3], "the request was not scheduled in one call"


def test_request_unseen_for_many_calls_has_ended(rows):
    rows.call()
    for _ in range(130):
        rows.call([2])
    assert len(rows.tracker) == 1
    assert rows.tracker.bytes_used == text_bytes(LEAST_ROOM)


def test_texts_stay_within_their_budget():
    most, budget = 6, least_bytes(6) + text_bytes(1024)
    rows = Rows(RequestTracker(backend(), most, budget), most)
    generator = np.random.default_rng(0)
    for row in range(most):
        rows.put(row, generator.integers(0, 99, 100 + 200 * row))
    numbers = rows.call()
    for _ in range(700):
        assert rows.call() == numbers, "a text without room keeps its last half"
        assert rows.tracker.bytes_used <= budget
    rows.put(0, [1, 2])
    assert rows.call([0]) == [7]
    assert rows.tracker.bytes_used <= budget


def test_text_grows_within_the_budget():
    rows = Rows(RequestTracker(backend(), 2, least_bytes(2) + text_bytes(4096)), 1)
    rows.put(0, [1, 2])
    for _ in range(1500):
        assert rows.call() == [1]
    assert text_bytes(2048) <= rows.tracker.bytes_used < text_bytes(4096)
