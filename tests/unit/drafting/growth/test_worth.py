"""How many drafted tokens pay, by what a forward of one more row costs."""

from __future__ import annotations

import numpy as np
import pytest

from osd.drafting.worth import Worth
from osd.economy.costs import CostModel


def worth(seconds: list[float], *, tokens: float = 1.0, rows: int = 1, usual: int | None = None) -> Worth:
    return Worth(tokens, rows, np.array(seconds), usual, CostModel(), rows)


def test_as_many_nodes_as_make_the_most_tokens_a_second() -> None:
    chances = [0.9, 0.6, 0.3, 0.1]
    free = worth([1.0] * 6)
    assert free.best(chances, 1) == 4
    linear = worth([0.0, 1, 2, 3, 4, 5])
    assert linear.best(chances, 1) == 0
    # 1.9 / 1.2, then 2.5 / 1.4, 2.8 / 1.6 and 2.9 / 1.8
    assert worth([0.0, 1, 1.2, 1.4, 1.6, 1.8]).best(chances, 1) == 2


def test_a_step_in_the_costs_is_looked_beyond() -> None:
    """The second row costs half a forward, the three after it nothing: all or none."""
    steps = worth([0.0, 1, 1.5, 1.5, 1.5, 1.5])
    assert steps.best([0.4, 0.4, 0.4, 0.4], 1) == 4
    assert steps.best([0.4, 0.05], 1) == 0


def test_more_nodes_than_costs_are_known_of_are_not_drafted() -> None:
    assert worth([0.0, 1, 1, 1]).best([0.9] * 10, 1) == 2
    assert worth([0.0, 1]).best([0.9], 1) == 0
    assert worth([0.0, 1]).floor() == 1.0


def test_beside_a_prompt_a_draft_must_earn_what_it_does_in_a_round_without_one() -> None:
    """A round that reads 8 rows is slow whatever is drafted, so that a row seems cheap beside it."""
    seconds = [0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    alone, beside = worth(seconds), worth(seconds, rows=9, tokens=1.0, usual=1)
    assert worth(seconds, rows=9).best([0.5], 1) == 1  # as if nothing else could be done with the second
    assert alone.best([0.5], 1) == beside.best([0.5], 1) == 0


def test_no_node_below_the_floor_ever_pays_and_the_floor_is_a_price() -> None:
    round_ = worth([0.0, 1, 1.1, 1.2, 1.8, 2.4])
    assert round_.floor() == pytest.approx(0.1)
    assert round_.best([0.099], 1) == 0
    assert round_.best([0.101], 1) == 1


def test_a_draft_that_was_made_changes_what_the_next_is_worth() -> None:
    seconds = [0.0, 1, 1.1, 2.0, 3.0]
    before = worth(seconds)
    after = before.after(1, 0.9)
    assert (after.rows, after.tokens) == (2, 1.9)
    assert before.best([0.6], 1) == 1
    assert after.best([0.6], 1) == 0  # its row would cost nine times as much
    assert before.after(99, 0.0).rows == 4


def test_a_node_costs_what_the_seconds_of_its_row_are_worth() -> None:
    own = worth([0.0, 1.0, 1.5, 2.0, 2.5])
    assert own.price(2, 4.0) == pytest.approx(2.0)
    assert own.price(2, own.speed) == pytest.approx(0.5)
