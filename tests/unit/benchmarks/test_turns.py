from __future__ import annotations

import pytest
import torch

from benchmarks.turns import Mean, Spread, by_way, in_turns, ratios, rotated


def test_rotated_starts_each_turn_with_another_way():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_in_turns_runs_each_way_once_without_warm_up():
    calls: list[tuple[str, int]] = []
    sentences: list[str] = []

    def way(name: str):
        def run(turn: int) -> int:
            calls.append((name, turn))
            return 10 * turn

        return run

    results = list(in_turns({name: way(name) for name in "ab"}, 2, sentences.append))
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert results == [("b", 10), ("a", 10), ("a", 20), ("b", 20)]
    assert sentences == ["turn 0 of 2", "turn 1 of 2", "turn 2 of 2"]
    assert by_way(iter(results)) == {"a": [10, 20], "b": [10, 20]}
    assert [turn for _, turn in in_turns({"a": lambda turn: turn}, 2, warm_up=0)] == [0, 1]


def test_ratios_are_taken_within_a_turn():
    assert ratios([1.0, 30.0, 4.0], [2.0, 10.0, 4.0]) == Spread(1.0, 0.5, 3.0)
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_spread_is_median_smallest_and_largest():
    assert Spread.of([3.0, 1.0, 9.0]) == Spread(3.0, 1.0, 9.0)
    assert Spread(0.0123, 0.01, 0.02).text(1e3, 1) == "12.3 (10.0 to 20.0)"


def test_mean_is_below_zero_only_beyond_its_error():
    assert Mean.of(torch.tensor([-1.0, -1.1, -0.9])).below_zero
    assert not Mean.of(torch.tensor([-1.0, 1.0])).below_zero
