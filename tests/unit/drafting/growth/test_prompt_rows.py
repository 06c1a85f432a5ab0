"""Numbers of prompt tokens, compared with exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from osd.drafting.growth import GROWTHS, DraftBudget, DraftOutcome, Reach
from osd.drafting.growth.prompt_rows import (
    allotted,
    best_plan,
    drop_order,
    ends,
    expected_accepted,
    kept_shares,
    priced,
    stationary,
)
from osd.drafting.growth.sparse_tree import SparseTree
from osd.drafting.growth.tree_shape import best_paths, shape_of_paths
from osd.economy.costs import CostModel
from osd.economy.plan import StepBudget
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import DraftBatch
from tests.unit.verification.enumeration import Toy, check_integrity

TABLE = ((0.5, 0.2), (0.4, 0.1), (0.3,))
PARENTS = [-1, -1, 0, 0, 2]


def test_ends_subtracts_the_children_of_each_node() -> None:
    shares = kept_shares(PARENTS, TABLE)
    assert shares == pytest.approx([0.5, 0.2, 0.2, 0.05, 0.06])
    assert ends(PARENTS, shares) == pytest.approx([0.3, 0.25, 0.2, 0.14, 0.05, 0.06])
    assert sum(ends(PARENTS, shares)) == pytest.approx(1)


def test_kept_shares_outside_the_table_are_zero() -> None:
    assert kept_shares([-1, -1, -1, 0, 3, 4], TABLE) == pytest.approx([0.5, 0.2, 0.0, 0.2, 0.06, 0.0])


def test_expected_accepted_matches_the_best_drafts() -> None:
    assert expected_accepted(TABLE, 2) == pytest.approx([0, 0.7, 0.7, 0.7])
    assert expected_accepted(TABLE, 5) == pytest.approx([0, 0.7, 0.7 + 0.2 + 0.08 + 0.05, 0.7 + 0.2 + 0.08 + 0.06])
    assert expected_accepted(TABLE, 2, price=0.3) == pytest.approx([0, 0.2, 0.2, 0.2])


def test_drop_order_keeps_one_prompt_token_per_place() -> None:
    places, gains = [0.5, 0.3, 0.2], [0.0, 1.0, 1.5, 1.6]
    # Losses: third ones .05 .03 .02, second ones .25 .15 .10, first ones .5 .3 .2.
    assert drop_order(places, gains) == [2, 1, 0, 2, 1, 0, 2, 1, 0]
    assert allotted(places, gains, 9) == [3, 3, 3]
    assert allotted(places, gains, 6) == [2, 2, 2]
    assert allotted(places, gains, 4) == [2, 1, 1]
    assert allotted(places, gains, 3) == [1, 1, 1]
    assert allotted(places, gains, 1) == [1, 0, 0]
    assert drop_order([0.9, 0.1], gains)[:3] == [
        1,
        1,
        0,
    ]  # a place keeps its last prompt token while another has several


PLACES, GAINS = [[0.5, 0.3, 0.02], [0.9]], [0.0, 1.0, 1.5, 1.6]


def budget(seconds: Sequence[float]) -> StepBudget:
    """Return the budget of a step with two rows, in which a second is worth one token."""
    return StepBudget(1.0, 2, np.array(seconds), CostModel())


def test_priced_drops_prompt_tokens_below_their_price() -> None:
    dear, cheap = ([1 + price * row for row in range(30)] for price in (0.6, 0.1))
    assert priced(PLACES, GAINS, [9, 9], 1, budget(cheap)) == [[2, 2, 0], [2]]
    assert priced(PLACES, GAINS, [9, 9], 2, budget(cheap)) == [[2, 1, 0], [2]]
    assert priced(PLACES, GAINS, [9, 9], 1, budget(dear)) == [[0, 0, 0], [1]]
    assert priced(PLACES, GAINS, [3, 9], 1, budget(cheap)) == [[2, 1, 0], [2]]
    assert priced(PLACES, GAINS, [9, 9], 1, budget(cheap[:5])) == [[1, 0, 0], [1]]


def test_priced_fills_rows_up_to_a_cost_step() -> None:
    free = [1.0] * 4 + [2.0] * 26
    assert priced(PLACES, GAINS, [9, 9], 1, budget(free)) == [[3, 3, 1], [3]]  # 1.89 tokens for 1
    assert priced([[0.5]], GAINS, [9], 1, budget(free)) == [[1]]  # the second row costs more than its 0.25 tokens
    assert priced([[0.3, 0.2]], GAINS, [9], 2, budget(free)) == [[0, 0]]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_priced_is_close_to_exhaustive_search(seed: int, copies: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    places = [[chance.random() for _ in range(2)], [chance.random()]]
    gains = list(itertools.accumulate(sorted((chance.random() for _ in range(2)), reverse=True), initial=0.0))
    seconds = list(itertools.accumulate(chance.choice([0.0, 0.1, 0.6]) for _ in range(20)))
    step = budget([1 + each for each in seconds])

    def value(counts: Sequence[int]) -> float:
        rows = 2 + copies * sum(counts)
        gained = sum(pc * gains[count] for pc, count in zip([*places[0], *places[1]], counts, strict=True))
        return gained - step.rho * float(step.seconds[rows] - step.seconds[2])

    counts = [count for place_counts in priced(places, gains, [9, 9], copies, step) for count in place_counts]
    assert value(counts) == pytest.approx(max(map(value, itertools.product(range(3), repeat=3))), abs=0.03)


def test_stationary_law_is_invariant() -> None:
    moves = [[0.0, 0.0, 1.0], [0.2, 0.5, 0.3], [0.1, 0.4, 0.5]]
    law = torch.tensor(stationary(moves), dtype=torch.float64)
    assert law.sum() == pytest.approx(1)
    assert (law @ torch.tensor(moves, dtype=torch.float64) - law).abs().max() < 1e-9


def every_plan(budget: int, levels: int, seconds: dict[int, float]) -> float:
    """Return the tokens per second of the best plan, over all numbers of nodes and prompt tokens in each state."""
    states = []
    for depth in range(levels + 1):
        choices = []
        paths = best_paths(TABLE[:depth], budget)
        for nodes in range(min(1, len(paths)), len(paths) + 1):
            share = dict(paths[:nodes])
            shape = sorted(share, key=lambda path: (len(path), path))
            places = ends(shape_of_paths(shape), [share[path] for path in shape])
            for counts in itertools.product(range(1, levels + 1), repeat=len(places)):
                moves = [sum(p for p, n in zip(places, counts, strict=True) if n == c) for c in range(levels + 1)]
                choices.append((1 + sum(share.values()), moves, seconds[len(places) + sum(counts)]))
        states.append(choices)
    best = 0.0
    for plan in itertools.product(*states):
        law = stationary([moves for _, moves, _ in plan])
        tokens, took = (sum(s * state[part] for s, state in zip(law, plan, strict=True)) for part in (0, 2))
        best = max(best, tokens / took)
    return best


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.05, 0.1, 0.3])
def test_best_plan_equals_exhaustive_search(slope: float) -> None:
    seconds = {rows: 1 + slope * rows for rows in range(1, 30)}
    plan = best_plan(TABLE, 3, 2, 1, seconds)
    assert plan.speed == pytest.approx(every_plan(3, 2, seconds), rel=1e-6)
    law = stationary([state.moves for state in plan.states])
    tokens = sum(share * (1 + state.accepted) for share, state in zip(law, plan.states, strict=True))
    assert plan.speed == pytest.approx(
        tokens / sum(s * state.seconds for s, state in zip(law, plan.states, strict=True))
    )


def test_best_plan_shrinks_with_row_costs_and_copies() -> None:
    def rows(slope: float, copies: int = 1) -> int:
        plan = best_plan(TABLE, 8, 3, copies, {rows: 1 + slope * rows for rows in range(1, 200)})
        return max(len(state.paths) + state.prompt_tokens for state in plan.states)

    assert rows(0.0) == 8 + 3 * 9
    assert rows(0.0) > rows(0.02) > rows(0.3) == 3
    assert rows(0.02, copies=4) < rows(0.02)


def test_best_plan_stays_within_measured_sizes() -> None:
    plan = best_plan(TABLE, 8, 3, 1, {1: 1.0, 8: 1.0})
    assert all(1 + len(state.paths) + state.prompt_tokens <= 8 for state in plan.states)


def riding(tokens: list[int]) -> Toy:
    toy = Toy.random(3, 4, 5)
    return Toy(toy.p, toy.q, 4, levels=3, reach=Reach(tokens, 1))


def grown(growth: SparseTree, tokens: list[int], limit: int = 100) -> DraftBatch:
    ids = torch.arange(len(tokens))
    settings = [SamplingParams()] * len(tokens)
    return growth.grow(
        riding(tokens), SamplingBatch.of(settings), Noise(ids, ids, ids), DraftBudget(torch.full((len(tokens),), limit))
    )  # fmt: skip


def test_sparse_tree_uses_the_tree_of_each_state() -> None:
    growth = GROWTHS["sparse_tree"](ranks=TABLE, budget=6)
    draft = grown(growth, [0, 1, 2, 3, 2])
    assert draft.sizes.tolist() == [len(growth.plan.states[state].paths) for state in (0, 1, 2, 3, 2)]
    assert draft.depths().amax(-1).tolist() == [0, 1, 2, 3, 2]
    assert grown(growth, [3], limit=2).sizes.tolist() == [2]
    assert [growth.rider_rows(state) for state in range(4)] == [state.prompt_tokens for state in growth.plan.states]
    check_integrity(draft)


def test_sparse_tree_plan_follows_rates_and_row_costs() -> None:
    growth = GROWTHS["sparse_tree"](ranks=TABLE, budget=4)
    grown(growth, [3])
    before = growth.plan
    for _ in range(16):
        growth.observe([DraftOutcome([-1, 0, 1], [])], lambda share: {1: 1.0, 2: 1.2, 32: 8.0})
    assert growth.plan.states[3].prompt_tokens < before.states[3].prompt_tokens
    assert len(growth.plan.states[3].paths) < len(before.states[3].paths)
    draft = grown(growth, [3, 1])
    assert draft.sizes.tolist() == [len(growth.plan.states[state].paths) for state in (3, 1)]
    assert growth.max_nodes >= int(draft.sizes.max())
