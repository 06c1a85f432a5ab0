from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from osd.drafting.compatibility import IncompatibleError, check_compatible
from osd.drafting.growth import GROWTHS, DraftBudget, DraftOutcome, Growth
from osd.drafting.growth.base import Reach
from osd.drafting.growth.best_first import BestFirst
from osd.drafting.growth.chance_table import ChanceTable
from osd.drafting.growth.tree_shape import best_shape, shape_of_paths
from osd.economy.costs import CostModel
from osd.economy.plan import StepBudget
from osd.verification import VERIFICATIONS
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import ROOT, DraftBatch, TreeBuilder
from tests.unit.verification.enumeration import Toy, check_integrity, plain_sampling


class Counting:
    """Toy source that checks that parents are expanded first and each node only once."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.support, self.levels, self.block, self.calls = toy, toy.support, toy.levels, toy.block, 0
        self.reach = toy.reach
        self.expanded: set[tuple[int, int]] = set()

    def expand(self, builder: TreeBuilder, rows: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            assert node == ROOT or (row, int(builder.parents[row, node])) in self.expanded
            assert node < int(builder.sizes[row])
            assert (row, node) not in self.expanded
            self.expanded.add((row, node))
        return self.toy.expand(builder, rows, nodes)

    def acceptance(self) -> torch.Tensor:
        return self.toy.acceptance()


def grown(
    growth: Growth, limits: list[int], temperature: float = 1.0, top_p: float = 1.0, reach: Reach | None = None
) -> tuple[DraftBatch, Counting, Toy]:
    toy, ids = Toy.random(1, 4, 7), torch.arange(len(limits))
    toy = replace(toy, levels=None if reach is None else 3, reach=reach)
    drafter = Counting(toy)
    params = SamplingParams(temperature, top_p=top_p)
    settings = SamplingBatch.of([params] * len(limits))
    draft = growth.grow(drafter, settings, Noise(ids, ids, ids), DraftBudget(torch.tensor(limits)))
    check_integrity(draft)
    return draft, drafter, toy


EVERY = [
    GROWTHS["chain"](4), GROWTHS["confidence"](eta=0.3, depth=5), GROWTHS["heuristic"](start=2, depth=5),
    GROWTHS["acceptance_head"](h=0.8, depth=5),
    GROWTHS["dynamic_tree"](budget=6), GROWTHS["dynamic_tree"](budget=6, threshold=0.05),
    GROWTHS["best_first"](budget=6),
    GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0), (0, 1), (1, 0)]), GROWTHS["top_k_tree"](budget=6, top_k=2,
    depth=3),
]  # fmt: skip


@pytest.mark.parametrize("growth", EVERY, ids=lambda growth: growth.name)
def test_growth_expands_each_node_once_within_limits(growth: Growth) -> None:
    draft, _, _ = grown(growth, [0, 1, 2, 3, 100])
    assert all(size <= limit for size, limit in zip(draft.sizes.tolist(), [0, 1, 2, 3, growth.max_nodes], strict=True))
    assert draft.sizes[1] == 1
    assert draft.sizes[4] > 1


@pytest.mark.parametrize("growth", EVERY, ids=lambda growth: growth.name)
def test_growth_paths_stay_within_the_reach(growth: Growth) -> None:
    draft, _, _ = grown(growth, [100] * 4, reach=Reach([0, 1, 2, 5], 1))
    longest = draft.depths().amax(1).tolist()
    assert all(depth <= most for depth, most in zip(longest, [0, 1, 2, 3], strict=True))
    assert longest[1] == 1


@pytest.mark.parametrize("growth", EVERY, ids=lambda growth: growth.name)
def test_growth_without_room_gives_an_empty_draft(growth: Growth) -> None:
    draft, drafter, _ = grown(growth, [0, 0])
    assert draft.tokens.shape == (2, 0)
    assert drafter.calls == 0


@pytest.mark.parametrize("growth", [growth for growth in EVERY if not growth.is_priced], ids=lambda growth: growth.name)
def test_growth_keeps_the_q_of_the_drafter(growth: Growth) -> None:
    draft, _, toy = grown(growth, [100] * 8)
    codes = toy.codes(draft.tokens, draft.parents)
    for row, node in draft.valid.nonzero().tolist():
        parent = int(draft.parents[row, node])
        code = 0 if parent == ROOT else int(codes[row, parent])
        assert torch.allclose(draft.q[draft.q_row[row, node]], toy.q[code])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.4, 1.0), (1.0, 0.6)])
def test_confidence_keeps_the_first_unlikely_token_and_stops(temperature: float, top_p: float) -> None:
    draft, _, toy = grown(GROWTHS["confidence"](eta=0.3, depth=5), [5] * 64, temperature=temperature, top_p=top_p)
    codes = torch.cat([torch.zeros(64, 1, dtype=torch.int64), toy.codes(draft.tokens, draft.parents)], 1)
    for row, size in enumerate(draft.sizes.tolist()):
        shares = [float(toy.q[codes[row, i], draft.tokens[row, i]]) for i in range(size)]
        assert all(share >= 0.3 for share in shares[:-1])
        assert shares[-1] < 0.3 or size == 5
    assert len(set(draft.sizes.tolist())) > 2


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_confidence_stops_at_block_ends(block: int) -> None:
    toy = Toy.random(1, 4, 7)
    ids, drafter = torch.arange(3), replace(toy, q=torch.full_like(toy.q, 0.25), block=block)
    growth, limits = GROWTHS["confidence"](eta=0.5, depth=6), torch.full((3,), 6)
    draft = growth.grow(drafter, plain_sampling(3), Noise(ids, ids, ids), DraftBudget(limits))
    assert draft.sizes.tolist() == [block] * 3


def test_acceptance_head_chain_ignores_the_last_token() -> None:
    draft, _, toy = grown(GROWTHS["acceptance_head"](h=0.8, depth=5), [5] * 64)
    for codes, size in zip(toy.codes(draft.tokens, draft.parents), draft.sizes.tolist(), strict=True):
        toy.expanded[:] = [codes[:size]]
        accepted = toy.acceptance().double().cumprod(-1)  # of the first token, of the first two, ...
        assert all(1 - accepted[: size - 2] <= 0.8)
        assert size < 3 or size == 5 or 1 - accepted[size - 2] > 0.8
        assert size >= 2, "the first token is unread when the second is drawn"
    assert len(set(draft.sizes.tolist())) > 2


def test_heuristic_moves_up_two_and_down_one_within_bounds() -> None:
    growth = GROWTHS["heuristic"](start=3, depth=6)
    assert growth.first_limit == 3
    steps = [(3, 3, 3), (3, 3, 2), (1, 1, 0), (6, 6, 6), (3, 0, 0)]  # depth, drafted, accepted
    assert [growth.next_limit(*outcome) for outcome in steps] == [5, 2, 1, 6, 3]


def path_probabilities(draft: DraftBatch, toy: Toy, row: int) -> tuple[list[float], dict[int, float]]:
    """Return the probability of each node's path, and the value of the next child of each node."""
    size = int(draft.sizes[row])
    codes = toy.codes(draft.tokens, draft.parents)[row].tolist()
    parents, tokens = draft.parents[row].tolist(), draft.tokens[row].tolist()
    reach: list[float] = []
    for node in range(size):
        above, code = (1.0, 0) if parents[node] == ROOT else (reach[parents[node]], codes[parents[node]])
        reach.append(above * float(toy.q[code, tokens[node]]))
    worth = {}
    for owner in range(ROOT, size):
        children = [reach[node] for node in range(size) if parents[node] == owner]
        worth[owner] = (1.0 if owner == ROOT else reach[owner]) - sum(children)
    return reach, worth


def test_dynamic_tree_draws_at_the_best_place() -> None:
    """Without counts, the chance of a child is its parent's times about the drafter's estimate."""
    draft, _, toy = grown(GROWTHS["dynamic_tree"](budget=10), [10] * 16)
    table, codes = ChanceTable(), toy.codes(draft.tokens, draft.parents)
    for row in range(16):
        parents, tokens = draft.parents[row].tolist(), draft.tokens[row].tolist()
        reach, depths, left, ranks = {ROOT: 1.0}, {ROOT: 0}, {ROOT: toy.q[0].clone()}, {ROOT: 0}
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            owners = list(reach)
            largest = torch.stack([left[owner].max() for owner in owners])
            depth, rank = (torch.tensor([of[owner] for owner in owners]) for of in (depths, ranks))
            chances = table.chances(torch.ones(len(owners), dtype=torch.bool), depth, rank, largest).tolist()
            worth = {owner: reach[owner] * chance for owner, chance in zip(owners, chances, strict=True)}
            assert float(draft.estimates[row, node]) == pytest.approx(float(left[parent].max()))
            assert worth[parent] == max(worth.values())
            left[parent][token] = 0.0
            ranks[parent] += 1
            reach[node], depths[node], ranks[node] = worth[parent], depths[parent] + 1, 0
            left[node] = toy.q[int(codes[row, node])].clone()


def outcomes(growth: Growth, toy: Toy, steps: int, right: set[int]) -> None:
    """Report to a policy that the target accepts paths of the tokens ``right``."""
    for seed in range(steps):
        ids = torch.tensor([seed])
        settings = plain_sampling(1)
        draft = growth.grow(
            Counting(toy), settings, Noise(ids, ids, ids), DraftBudget(torch.tensor([growth.max_nodes]))
        )
        parents, tokens = draft.parents[0].tolist(), draft.tokens[0].tolist()
        path: list[int] = []
        while True:
            last = path[-1] if path else ROOT
            kept = [node for node, parent in enumerate(parents) if parent == last and tokens[node] in right]
            if not kept:
                break
            path.append(kept[0])
        growth.observe([DraftOutcome(parents, path, draft.estimates[0].tolist(), drawn=True)], lambda together: {})


@pytest.mark.parametrize("name", ["dynamic_tree", "best_first"])
def test_growth_prefers_counted_rates_over_estimates(name: str) -> None:
    """A drafter that is always right gets deep trees, and a drafter that is never right does not."""
    toy = Toy.random(3, 4, 7)

    def depth_of_the_next(growth: Growth) -> int:
        ids = torch.tensor([999])
        draft = growth.grow(
            Counting(toy), plain_sampling(1), Noise(ids, ids, ids), DraftBudget(torch.tensor([growth.max_nodes]))
        )
        return int(draft.depths().max())

    always, never = GROWTHS[name](budget=5), GROWTHS[name](budget=5)
    outcomes(always, toy, 80, right={0, 1, 2, 3})
    outcomes(never, toy, 80, right=set())
    before = depth_of_the_next(GROWTHS[name](budget=5))
    assert depth_of_the_next(always) >= max(before, 4)
    assert depth_of_the_next(never) <= before
    never.forget()
    always.forget()


@pytest.mark.parametrize(("seconds", "calls", "nodes"), [
    ([0, 1, 1.05, 1.1, 1.15, 1.2], 3, 3),
    ([0, 1, 1.05, 2.5, 4, 5.5], 1, 1),  # the second node costs thirty times as much as the first
])  # fmt: skip
def test_best_first_calls_only_for_nodes_above_their_price(seconds: list[float], calls: int, nodes: int) -> None:
    toy = Toy.random(1, 4, 7)
    sure = Counting(replace(toy, q=torch.tensor([[0.985, 0.005, 0.005, 0.005]]).expand(len(toy.q), -1), levels=3))
    ids, step = torch.tensor([0]), StepBudget(1.0, 1, np.array(seconds), CostModel())
    draft = BestFirst(budget=3).grow(
        sure, plain_sampling(1), Noise(ids, ids, ids), DraftBudget(torch.tensor([3]), step)
    )
    assert sure.calls == calls
    assert draft.parents.tolist() == [list(range(-1, nodes - 1))]


def test_chance_table_forget_keeps_rates_with_little_weight() -> None:
    table = ChanceTable()

    def chance() -> float:
        return table.chance_at(True, 0, 0, 0.5)

    for number in range(400):
        table.observe(DraftOutcome([ROOT], [0] if number % 4 else [], [0.5], drawn=True))
    table.forget()
    assert chance() == pytest.approx(0.75, abs=0.1)
    assert table.first_at(True, 0) == pytest.approx(0.875, abs=0.05)  # half of it is the prior, which is 1
    for _ in range(48):
        table.observe(DraftOutcome([ROOT], [], [0.5], drawn=True))
    assert chance() < 0.25


def test_dynamic_tree_threshold_makes_one_call_per_level() -> None:
    draft, drafter, toy = grown(GROWTHS["dynamic_tree"](budget=200, threshold=0.1), [200] * 16)
    assert drafter.calls <= int(draft.depths().max()) + 1
    for row in range(16):
        _, worth = path_probabilities(draft, toy, row)
        assert max(worth.values()) < 0.1


def test_top_k_tree_holds_the_most_probable_paths() -> None:
    draft, drafter, toy = grown(GROWTHS["top_k_tree"](budget=12, top_k=3, depth=2), [100])
    assert drafter.calls == 2
    assert int(draft.sizes[0]) == 12
    reach, _ = path_probabilities(draft, toy, 0)
    pairs = sorted((float(toy.q[0, a] * toy.q[1 + a, b]) for a in range(4) for b in range(4)), reverse=True)
    assert max(reach[3:]) == pytest.approx(pairs[0])


def test_shape_of_paths_orders_nodes_by_level() -> None:
    assert shape_of_paths([(1,), (0, 0), (0,), (1, 0)]) == (ROOT, ROOT, 0, 1)


@pytest.mark.parametrize("paths", [[(0, 0)], [(1,)], [(0,), (0,)], [()], [(-1,)]])
def test_shape_of_paths_refuses_an_invalid_tree(paths: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="tree path"):
        shape_of_paths(paths)


def expected_length(shape: tuple[int, ...], acceptance: list[float]) -> float:
    value, ranks = [], []
    for node, parent in enumerate(shape):
        rank = sum(other == parent for other in shape[:node])
        ranks.append(rank)
        value.append((1.0 if parent == ROOT else value[parent]) * (acceptance[rank] if rank < len(acceptance) else 0.0))
    return sum(value)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("acceptance", [[0.9], [0.6, 0.3], [0.4, 0.3, 0.2]])
def test_best_shape_equals_exhaustive_search(acceptance: list[float], depth: int) -> None:
    nodes = 4
    shape, promised = best_shape(acceptance, nodes, depth)
    best = 0.0
    for parents in itertools.product(*(range(-1, i) for i in range(nodes))):
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        if max(depths) <= depth:
            best = max(best, expected_length(parents, acceptance))
    assert promised == pytest.approx(best)
    assert expected_length(shape, acceptance) == pytest.approx(best)
    assert len(shape) <= nodes


@pytest.mark.parametrize(("growth", "rule", "why"), [
    (GROWTHS["static_tree"](paths=[(0,), (1,)], draw="deterministic"), "siblings", "without drawing"),
    (GROWTHS["top_k_tree"](budget=4), "traversal", "without drawing"),
    (GROWTHS["static_tree"](paths=[(0,)], draw="deterministic"), "chain", "without drawing"),
    (GROWTHS["dynamic_tree"](budget=4), "chain", "grows trees"),
    (GROWTHS["dynamic_tree"](budget=4), "k_seq", "without replacement"),
    (GROWTHS["dynamic_tree"](budget=4), "greedy_multidraft", "how many more"),
    (GROWTHS["static_tree"](paths=[(0,), (1,)], draw="top_then_drawn"), "siblings", "only the last"),
])  # fmt: skip
def test_biased_combination_is_refused_with_the_reason(growth: Growth, rule: str, why: str) -> None:
    with pytest.raises(IncompatibleError, match=why) as caught:
        check_compatible(growth, VERIFICATIONS[rule])
    assert growth.name in str(caught.value)
    assert rule in str(caught.value)


@pytest.mark.parametrize("rule", list(VERIFICATIONS))
def test_chains_fit_every_rule(rule: str) -> None:
    for growth in (GROWTHS["chain"](2), GROWTHS["static_tree"](paths=[(0,), (0, 0)])):
        check_compatible(growth, VERIFICATIONS[rule])


def test_greedy_static_tree_takes_the_best_children() -> None:
    draft, _, toy = grown(GROWTHS["static_tree"](paths=[(0,), (1,)]), [2] * 5, temperature=0.0)
    best = toy.q[0].topk(2).indices.tolist()
    assert draft.tokens.tolist() == [best] * 5


@pytest.mark.parametrize("build", [
    lambda: GROWTHS["chain"](0), lambda: GROWTHS["confidence"](eta=2, depth=1),
    lambda: GROWTHS["acceptance_head"](h=-1, depth=1), lambda: GROWTHS["heuristic"](start=3,
    depth=2), lambda: GROWTHS["dynamic_tree"](budget=0), lambda: GROWTHS["dynamic_tree"](budget=1, threshold=0.0),
    lambda: GROWTHS["top_k_tree"](budget=1, top_k=0), lambda: GROWTHS["static_tree"](),
    lambda: GROWTHS["static_tree"](acceptance=[], budget=2), lambda: GROWTHS["static_tree"](paths=[]),
    lambda: GROWTHS["static_tree"](acceptance=[0.5], budget=0),
    lambda: GROWTHS["static_tree"](acceptance=[0.5], budget=2, depth=0),
])  # fmt: skip
def test_growth_parameter_out_of_range_is_refused(build) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        build()
