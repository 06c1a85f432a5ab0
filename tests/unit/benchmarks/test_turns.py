from __future__ import annotations

import pytest
import torch

from benchmarks.turns import Mean, Spread, by_way, in_turns, ratios, rotated


def test_rotated_begins_with_another_way_each_turn():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_in_turns_runs_every_way_once_a_turn_and_drops_the_warm_up():
    ran: list[tuple[str, int]] = []
    said: list[str] = []

    def way(name: str):
        def run(turn: int) -> int:
            ran.append((name, turn))
            return 10 * turn

        return run

    found = list(in_turns({name: way(name) for name in "ab"}, 2, said.append))
    assert ran == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == [("b", 10), ("a", 10), ("a", 20), ("b", 20)]
    assert said == ["turn 0 of 2", "turn 1 of 2", "turn 2 of 2"]
    assert by_way(iter(found)) == {"a": [10, 20], "b": [10, 20]}
    assert [turn for _, turn in in_turns({"a": lambda turn: turn}, 2, warm_up=0)] == [0, 1]


def test_ratios_are_taken_within_a_turn():
    assert ratios([1.0, 30.0, 4.0], [2.0, 10.0, 4.0]) == Spread(1.0, 0.5, 3.0)
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_spread_is_the_median_and_both_ends():
    assert Spread.of([3.0, 1.0, 9.0]) == Spread(3.0, 1.0, 9.0)
    assert Spread(0.0123, 0.01, 0.02).text(1e3, 1) == "12.3 (10.0 to 20.0)"


def test_mean_is_below_zero_only_by_more_than_its_error():
    assert Mean.of(torch.tensor([-1.0, -1.1, -0.9])).below_zero
    assert not Mean.of(torch.tensor([-1.0, 1.0])).below_zero
