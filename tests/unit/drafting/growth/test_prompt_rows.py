"""How many prompt tokens hang on each node: by hand, and plans against every plan that there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from osd.drafting.growth import GROWTHS, Budget, DraftOutcome, Reach
from osd.drafting.growth.prompt_rows import (
    allotted,
    best_plan,
    drop_order,
    ends,
    expected_accepted,
    kept_shares,
    paying,
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


def test_a_path_ends_at_a_node_as_often_as_it_is_kept_less_its_children() -> None:
    shares = kept_shares(PARENTS, TABLE)
    assert shares == pytest.approx([0.5, 0.2, 0.2, 0.05, 0.06])
    assert ends(PARENTS, shares) == pytest.approx([0.3, 0.25, 0.2, 0.14, 0.05, 0.06])
    assert sum(ends(PARENTS, shares)) == pytest.approx(1)


def test_what_a_table_does_not_know_is_never_kept() -> None:
    assert kept_shares([-1, -1, -1, 0, 3, 4], TABLE) == pytest.approx([0.5, 0.2, 0.0, 0.2, 0.06, 0.0])


def test_gains_are_those_of_the_best_drafts_of_each_depth() -> None:
    assert expected_accepted(TABLE, 2) == pytest.approx([0, 0.7, 0.7, 0.7])
    assert expected_accepted(TABLE, 5) == pytest.approx([0, 0.7, 0.7 + 0.2 + 0.08 + 0.05, 0.7 + 0.2 + 0.08 + 0.06])
    assert expected_accepted(TABLE, 2, price=0.3) == pytest.approx([0, 0.2, 0.2, 0.2])


def test_the_smallest_loss_goes_first_and_no_place_loses_its_only_one_before_others_lose_theirs() -> None:
    places, gains = [0.5, 0.3, 0.2], [0.0, 1.0, 1.5, 1.6]
    # Losses: third ones .05 .03 .02, second ones .25 .15 .10, first ones .5 .3 .2.
    assert drop_order(places, gains) == [2, 1, 0, 2, 1, 0, 2, 1, 0]
    assert allotted(places, gains, 9) == [3, 3, 3]
    assert allotted(places, gains, 6) == [2, 2, 2]
    assert allotted(places, gains, 4) == [2, 1, 1]
    assert allotted(places, gains, 3) == [1, 1, 1]
    assert allotted(places, gains, 1) == [1, 0, 0]
    assert drop_order([0.9, 0.1], gains)[:3] == [1, 1, 0]  # the only one of a place stays while others have several


PLACES, GAINS = [[0.5, 0.3, 0.02], [0.9]], [0.0, 1.0, 1.5, 1.6]


def budget(seconds: Sequence[float]) -> StepBudget:
    """Of a step of two rows, of which a second is worth a token."""
    return StepBudget(1.0, 2, np.array(seconds), CostModel())


def test_what_is_not_worth_its_price_does_not_ride() -> None:
    dear, cheap = ([1 + price * row for row in range(30)] for price in (0.6, 0.1))
    assert paying(PLACES, GAINS, [9, 9], 1, budget(cheap)) == [[2, 2, 0], [2]]
    assert paying(PLACES, GAINS, [9, 9], 2, budget(cheap)) == [[2, 1, 0], [2]]
    assert paying(PLACES, GAINS, [9, 9], 1, budget(dear)) == [[0, 0, 0], [1]]
    assert paying(PLACES, GAINS, [3, 9], 1, budget(cheap)) == [[2, 1, 0], [2]]
    assert paying(PLACES, GAINS, [9, 9], 1, budget(cheap[:5])) == [[1, 0, 0], [1]]


def test_rows_that_cost_in_steps_ride_as_far_as_the_step_that_they_pay_for() -> None:
    free = [1.0] * 4 + [2.0] * 26
    assert paying(PLACES, GAINS, [9, 9], 1, budget(free)) == [[3, 3, 1], [3]]  # 1.89 tokens for 1
    assert paying([[0.5]], GAINS, [9], 1, budget(free)) == [[1]]  # the second row would take what 0.25 tokens are for
    assert paying([[0.3, 0.2]], GAINS, [9], 2, budget(free)) == [[0, 0]]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_worth_more(seed: int, copies: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    places = [[chance.random() for _ in range(2)], [chance.random()]]
    gains = list(itertools.accumulate(sorted((chance.random() for _ in range(2)), reverse=True), initial=0.0))
    seconds = list(itertools.accumulate(chance.choice([0.0, 0.1, 0.6]) for _ in range(20)))
    given = budget([1 + each for each in seconds])

    def value(counts: Sequence[int]) -> float:
        rows = 2 + copies * sum(counts)
        brought = sum(pc * gains[count] for pc, count in zip([*places[0], *places[1]], counts, strict=True))
        return brought - given.rho * float(given.seconds[rows] - given.seconds[2])

    found = [count for mine in paying(places, gains, [9, 9], copies, given) for count in mine]
    assert value(found) == pytest.approx(max(map(value, itertools.product(range(3), repeat=3))), abs=0.03)


def test_the_stationary_law_stays_as_it_is() -> None:
    moves = [[0.0, 0.0, 1.0], [0.2, 0.5, 0.3], [0.1, 0.4, 0.5]]
    law = torch.tensor(stationary(moves), dtype=torch.float64)
    assert law.sum() == pytest.approx(1)
    assert (law @ torch.tensor(moves, dtype=torch.float64) - law).abs().max() < 1e-9


def every_plan(budget: int, levels: int, seconds: dict[int, float]) -> float:
    """Tokens per second of the best of all plans: any number of nodes, any prompt tokens on each, in each state."""
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
        tokens, took = (sum(s * one[part] for s, one in zip(law, plan, strict=True)) for part in (0, 2))
        best = max(best, tokens / took)
    return best


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.05, 0.1, 0.3])
def test_a_plan_is_as_good_as_the_best_of_all(slope: float) -> None:
    seconds = {rows: 1 + slope * rows for rows in range(1, 30)}
    plan = best_plan(TABLE, 3, 2, 1, seconds)
    assert plan.speed == pytest.approx(every_plan(3, 2, seconds), rel=1e-6)
    law = stationary([one.moves for one in plan.states])
    tokens = sum(share * (1 + one.accepted) for share, one in zip(law, plan.states, strict=True))
    assert plan.speed == pytest.approx(tokens / sum(s * one.seconds for s, one in zip(law, plan.states, strict=True)))


def test_plans_shrink_as_rows_cost_more_and_with_copies() -> None:
    def rows(slope: float, copies: int = 1) -> int:
        plan = best_plan(TABLE, 8, 3, copies, {rows: 1 + slope * rows for rows in range(1, 200)})
        return max(len(one.paths) + one.prompt_tokens for one in plan.states)

    assert rows(0.0) == 8 + 3 * 9
    assert rows(0.0) > rows(0.02) > rows(0.3) == 3
    assert rows(0.02, copies=4) < rows(0.02)


def test_no_draft_is_larger_than_what_was_measured() -> None:
    plan = best_plan(TABLE, 8, 3, 1, {1: 1.0, 8: 1.0})
    assert all(1 + len(one.paths) + one.prompt_tokens <= 8 for one in plan.states)


def riding(tokens: list[int]) -> Toy:
    toy = Toy.random(3, 4, 5)
    return Toy(toy.p, toy.q, 4, levels=3, reach=Reach(tokens, 1))


def grown(growth: SparseTree, tokens: list[int], limit: int = 100) -> DraftBatch:
    ids = torch.arange(len(tokens))
    settings = [SamplingParams()] * len(tokens)
    return growth.grow(
        riding(tokens), SamplingBatch.of(settings), Noise(ids, ids, ids), Budget(torch.full((len(tokens),), limit))
    )  # fmt: skip


def test_each_sequence_gets_the_tree_of_its_state() -> None:
    growth = GROWTHS["sparse_tree"](ranks=TABLE, budget=6)
    assert isinstance(growth, SparseTree)
    draft = grown(growth, [0, 1, 2, 3, 2])
    assert growth.plan is not None
    assert draft.sizes.tolist() == [len(growth.plan.states[state].paths) for state in (0, 1, 2, 3, 2)]
    assert draft.depths().amax(-1).tolist() == [0, 1, 2, 3, 2]
    assert grown(growth, [3], limit=2).sizes.tolist() == [2]
    assert [growth.rider_rows(state) for state in range(4)] == [one.prompt_tokens for one in growth.plan.states]
    check_integrity(draft)


def test_trees_of_all_states_follow_what_was_counted_and_what_rows_cost() -> None:
    growth = GROWTHS["sparse_tree"](ranks=TABLE, budget=4)
    assert isinstance(growth, SparseTree)
    grown(growth, [3])
    assert growth.plan is not None
    before = growth.plan
    for _ in range(16):
        growth.observe([DraftOutcome([-1, 0, 1], [])], lambda share: {1: 1.0, 2: 1.2, 32: 8.0})
    assert growth.plan.states[3].prompt_tokens < before.states[3].prompt_tokens
    assert len(growth.plan.states[3].paths) < len(before.states[3].paths)
    draft = grown(growth, [3, 1])
    assert draft.sizes.tolist() == [len(growth.plan.states[state].paths) for state in (3, 1)]
    assert growth.max_nodes >= int(draft.sizes.max())
