"""What was read stands for what is there for a while."""

from __future__ import annotations

import itertools

import pytest

from osd.registry import storage
from osd.registry.storage import ReadCache


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(storage.time, "monotonic", lambda: now[0])
    return now


def test_a_value_is_read_again_between_half_of_its_time_and_all_of_it(clock: list[float]):
    numbers = itertools.count()
    values = ReadCache(30.0)
    assert [values.get("a", lambda: next(numbers)) for _ in range(3)] == [0, 0, 0]
    clock[0] += 14.9
    assert values.get("a", lambda: next(numbers)) == 0
    clock[0] += 15.1
    assert values.get("a", lambda: next(numbers)) == 1


def test_names_are_apart_and_without_patience_nothing_is_remembered(clock: list[float]):
    values = ReadCache(30.0)
    assert (values.get("a", lambda: 1), values.get("b", lambda: 2)) == (1, 2)
    assert [ReadCache(0.0).get("a", lambda n=n: n) for n in (1, 2)] == [1, 2]


def test_in_doubt_a_value_counts_for_two_seconds(clock: list[float]):
    values = ReadCache(30.0)
    values.get("a", lambda: 1)
    clock[0] += 1.9
    values.doubt()
    assert values.get("a", lambda: 2) == 1
    clock[0] += 0.2
    assert values.get("a", lambda: 2) == 2


def test_a_read_that_fails_is_no_value(clock: list[float]):
    values = ReadCache(30.0)
    with pytest.raises(OSError, match="gone"):
        values.get("a", gone)
    assert values.get("a", lambda: 1) == 1


def gone() -> int:
    raise OSError("gone")
