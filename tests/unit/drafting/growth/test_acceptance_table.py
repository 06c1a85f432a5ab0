"""Acceptance tables, and the shapes of trees that follow them."""

from __future__ import annotations

import itertools
import random

import pytest

from osd.drafting.growth import GROWTHS
from osd.drafting.growth.acceptance_table import AcceptanceTable
from osd.drafting.growth.static_tree import StaticTree
from osd.drafting.growth.tree_shape import shape_of_paths

PRIOR = [[0.5, 0.2, 0.1], [0.4, 0.2], [0.3]]
FLAT, STEEP = {1: 1.0, 64: 1.0}, {1: 1.0, 2: 1.9, 64: 60.0}
#         root -> 0, 1, 2;  0 -> 3;  1 -> 4, 5
PARENTS = [-1, -1, -1, 0, 1, 1]


def test_table_without_tests_equals_its_prior() -> None:
    table = AcceptanceTable(PRIOR)
    assert [pytest.approx(level) for level in PRIOR] == table.by_depth()
    assert table.by_rank() == pytest.approx([0.4, 0.2, 0.1])


def test_untested_rank_scales_with_the_rank_before() -> None:
    table = AcceptanceTable(PRIOR)
    for _ in range(4000):
        table.observe([-1, -1], [])
    assert max(table.by_depth()[0]) < 0.01
    assert max(table.by_depth()[1]) < 0.01
    for _ in range(4000):
        table.observe([-1], [0])
    assert table.by_depth()[1] == pytest.approx([0.8, 0.4], rel=0.02)
    assert table.by_rank()[0] > 0.95


def test_observe_counts_children_of_accepted_nodes() -> None:
    table = AcceptanceTable([[0.0] * 3, [0.0] * 2, [0.0]])
    table.observe(PARENTS, [1, 5])
    weight = 1 / 9  # one test and a prior with the weight of eight
    assert table.by_depth() == [pytest.approx([0, weight, 0]), pytest.approx([0, weight]), [0.0]]
    table.observe(PARENTS, [])
    assert table.by_depth()[0][1] == pytest.approx(0.998 / 9.998)
    assert table.by_depth()[1][1] == pytest.approx(weight), "nothing below the root was tested"
    assert table.by_rank() == pytest.approx([0, (0.998 + 1) / (1.998 + 1 + 8), 0])


def test_rates_follow_changing_traffic() -> None:
    table = AcceptanceTable([[0.5]])
    for _ in range(3000):
        table.observe([-1], [0])
    assert table.by_depth()[0][0] > 0.98
    for _ in range(3000):
        table.observe([-1], [])
    assert table.by_depth()[0][0] < 0.02


def test_forget_turns_rates_into_a_weak_prior() -> None:
    table = AcceptanceTable([[0.5]])
    for _ in range(2000):
        table.observe([-1], [0])
    before = table.by_depth()
    table.forget()
    assert table.by_depth() == before
    for _ in range(24):
        table.observe([-1], [])
    assert table.by_depth()[0][0] < 0.3


def test_due_intervals_grow() -> None:
    table, looks = AcceptanceTable([[0.5]]), []
    for draft in range(1, 1200):
        table.observe([-1], [])
        if table.due():
            looks.append(draft)
    assert looks == list(itertools.accumulate([16, 32, 64, 128, 256, 256, 256]))


def live(growth: StaticTree, depths: list[list[float]], drafts: int = 2000) -> list[tuple[int, ...]]:
    """Return the paths of ``growth`` after traffic that accepts candidates with the shares ``depths``."""
    chance = random.Random(1)  # noqa: S311 - repeatable, not secret
    for draft in range(drafts):
        parents, path, at = list(shape_of_paths(growth.paths)), [], -1
        while len(path) < len(depths):
            u = chance.random()
            ends = list(itertools.accumulate(depths[len(path)]))
            rank = next((rank for rank, end in enumerate(ends) if u < end), None)
            children = [node for node, parent in enumerate(parents) if parent == at]
            if rank is None or rank >= len(children):
                break
            at = children[rank]
            path.append(at)
        growth.table.observe(parents, path)
        if draft % 100 == 0:
            growth.reshape(FLAT)
    return growth.paths


def test_static_tree_shape_follows_acceptance_by_rank() -> None:
    def grown(shares: list[float]) -> list[tuple[int, ...]]:
        return live(GROWTHS["static_tree"](acceptance=[0.5, 0.2, 0.1], budget=4, depth=4), [shares] * 4)

    assert grown([0.95, 0.01, 0.01]) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert sorted(grown([0.3, 0.28, 0.27]))[:1] == [(0,)]
    assert {(0,), (1,), (2,)} <= set(grown([0.3, 0.28, 0.27]))


def test_sparse_tree_follows_acceptance_by_depth() -> None:
    growth = GROWTHS["sparse_tree"](PRIOR, budget=4)
    assert set(live(growth, [[0.4, 0.3, 0.2], [0.02, 0.01], [0.01]])) >= {(0,), (1,), (2,)}
    assert (0, 0, 0) in live(growth, [[0.9, 0.02, 0.01], [0.9, 0.01], [0.9]])


@pytest.mark.parametrize("kind", ["static_tree", "sparse_tree"])
def test_reshape_follows_row_costs_within_the_budget(kind: str) -> None:
    parameters = {"acceptance": [0.5, 0.2], "depth": 3} if kind == "static_tree" else {"ranks": PRIOR}
    growth = GROWTHS[kind](budget=5, **parameters)
    assert growth.max_nodes == 5
    assert not growth.chains
    assert growth.reshape(STEEP)
    assert growth.max_nodes == 1
    assert not growth.chains, "later shapes may have branches"
    assert not growth.reshape(STEEP)
    assert growth.reshape(FLAT)
    assert growth.max_nodes == 5


def test_static_tree_of_paths_keeps_its_shape() -> None:
    growth = GROWTHS["static_tree"](paths=[(0,), (1,)])
    assert not growth.reshape(FLAT)
    assert growth.max_nodes == 2


def test_static_tree_with_a_zero_rank_fills_its_budget() -> None:
    assert GROWTHS["static_tree"](acceptance=[0.5, 0.0], budget=3, depth=2).max_nodes == 3
