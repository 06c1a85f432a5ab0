"""Budget of a decoding step: the number of nodes at a given rho, and rho itself."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest

from osd.economy.costs import CostModel
from osd.economy.plan import StepBudget, TokenRates, prompt_chunk


def budget(seconds: list[float], rho: float = 1.0, rows: int = 1) -> StepBudget:
    return StepBudget(rho, rows, np.array(seconds), CostModel())


def test_budget_takes_nodes_while_gain_exceeds_price() -> None:
    chances = [0.9, 0.6, 0.3, 0.1]
    assert budget([1.0] * 6).best(chances) == 4
    assert budget([0.0, 1, 2, 3, 4, 5]).best(chances) == 0
    assert budget([0.0, 1, 1.2, 1.4, 1.6, 1.8]).best(chances) == 3
    assert budget([0.0, 1, 1.2, 1.4, 1.6, 1.8], rho=2.0).best(chances) == 2


def test_budget_looks_beyond_a_jump_in_the_costs() -> None:
    """The second row costs half a second and the next three rows nothing: all or none is best."""
    steps = budget([0.0, 1, 1.5, 1.5, 1.5, 1.5])
    assert steps.best([0.4, 0.4, 0.4, 0.4]) == 4
    assert steps.best([0.4, 0.05]) == 0


@pytest.mark.parametrize("seed", range(50))
def test_best_number_of_nodes_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    seconds = list(accumulate(draw.choice([0.0, 0.01, 0.2]) for _ in range(draw.randrange(3, 30))))
    given = budget([1 + each for each in seconds], draw.uniform(0.1, 5.0), draw.randrange(1, 3))
    chances = sorted((draw.random() for _ in range(draw.randrange(20))), reverse=True)

    def value(count: int) -> float:
        return sum(chances[:count]) - given.rho * float(given.seconds[given.rows + count] - given.seconds[given.rows])

    counts = range(min(len(chances), given.room) + 1)
    assert value(given.best(chances)) == pytest.approx(max(map(value, counts)))


def test_budget_drafts_no_more_nodes_than_have_known_costs() -> None:
    assert budget([0.0, 1, 1, 1]).best([0.9] * 10) == 2
    assert budget([0.0, 1]).best([0.9]) == 0
    assert budget([0.0, 1]).floor() == 1.0


def test_budget_charges_the_same_for_a_row_in_steps_with_prompts() -> None:
    seconds = [0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    for chance, nodes in ((0.5, 0), (0.9, 2)):
        alone, with_prompt = (budget(seconds, 0.8, rows).best([chance] * 2) for rows in (1, 9))
        assert alone == with_prompt == nodes


def test_floor_is_the_smallest_mean_price_of_a_row() -> None:
    step = budget([0.0, 1, 1.1, 1.2, 1.8, 2.4])
    assert step.floor() == pytest.approx(0.1)
    assert step.best([0.099]) == 0
    assert step.best([0.101]) == 1


def test_budget_after_a_draft_begins_at_its_last_row() -> None:
    before = budget([0.0, 1, 1.1, 2.0, 3.0])
    after = before.after(1)
    assert after.rows == 2
    assert before.best([0.6]) == 1
    assert after.best([0.6]) == 0, "its row costs nine times as much"
    assert before.after(99).rows == 4


def test_price_is_rho_times_the_mean_seconds_of_a_row() -> None:
    step = budget([0.0, 1.0, 1.5, 1.5, 2.5], rho=4.0)
    assert step.price(1) == pytest.approx(2.0)
    assert step.price(2) == pytest.approx(1.0)
    assert step.after(99).price(1) == 0.0


def test_rho_starts_at_plain_decoding() -> None:
    rates = TokenRates()
    assert rates.at(1, 0.010) == pytest.approx(100)
    assert rates.at(8, 0.020) == pytest.approx(400)
    for _ in range(2000):
        rates.observe(1, 3, 0.012)
        rates.observe(8, 16, 0.025)
    assert rates.at(1, 0.010) == pytest.approx(250, rel=0.01)
    assert rates.at(8, 0.020) == pytest.approx(640, rel=0.01)
    assert rates.at(4, 0.015) == pytest.approx(4 / 0.015)


def test_rho_follows_recent_steps() -> None:
    rates = TokenRates()
    for tokens in (1, 4):
        for _ in range(1500):
            rates.observe(1, tokens, 0.010)
        assert rates.at(1, 0.010) == pytest.approx(100 * tokens, rel=0.02)


def test_one_slow_step_moves_rho_by_little() -> None:
    rates = TokenRates()
    for _ in range(1000):
        rates.observe(1, 2, 0.010)
    rates.observe(1, 2, 0.100)
    assert rates.at(1, 0.010) == pytest.approx(200, rel=0.05)


def test_prompt_chunks_double_the_step() -> None:
    rounds = np.array([1.0, 1.0, *np.linspace(1.1, 7.4, 64)])
    assert prompt_chunk(rounds, decoding=1, reading=1, most=64) == 10
    assert prompt_chunk(rounds, decoding=1, reading=3, most=64) == 30
    assert prompt_chunk(rounds, decoding=1, reading=3, most=20) == 20
    assert prompt_chunk(10 * np.arange(66.0), decoding=1, reading=1, most=64) == 4
