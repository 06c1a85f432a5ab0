from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osd.config import GROWTH_SETTINGS, SparseTreeSettings, StaticTreeSettings
from osd.drafting.growth import GROWTHS, DraftOutcome, make_growth
from osd.drafting.growth.acceptance_table import AcceptanceTable
from osd.drafting.growth.tree_shape import best_paths, best_shape, expected_tokens, hardware_aware_size
from osd.verification import VERIFICATIONS
from osd.verification.tree import ROOT
from tests.unit.verification.enumeration import ForkingNoise, Toy, step_of

TABLE = [[0.6, 0.2, 0.1], [0.5, 0.25], [0.3]]
FLAT = {1: 1.0, 64: 1.0}
STEEP = {1: 1.0, 2: 1.9, 64: 60.0}


def frequencies(table: list[list[float]]) -> list[float]:
    shares = []
    for depth in range(1, len(table) + 1):
        for path in itertools.product(*(range(len(ranks)) for ranks in table[:depth])):
            share = 1.0
            for level, rank in enumerate(path):
                share *= table[level][rank]
            shares.append(share)
    return sorted(shares, reverse=True)


@pytest.mark.parametrize("nodes", [1, 2, 4, 7, 100])
def test_best_paths_are_the_most_probable(nodes: int) -> None:
    chosen = best_paths(TABLE, nodes)
    assert [share for _, share in chosen] == pytest.approx(frequencies(TABLE)[:nodes])
    assert len({path for path, _ in chosen}) == len(chosen)


def test_best_paths_include_earlier_siblings() -> None:
    paths = [path for path, _ in best_paths([[0.1, 0.9], [0.5]], 2)]
    assert paths == [(0,), (1,)]


def test_expected_tokens_match_the_best_shapes() -> None:
    tokens = expected_tokens([0.6, 0.2], 8, 3)
    assert tokens[0] == 1.0
    assert tokens[1:] == pytest.approx([1 + best_shape([0.6, 0.2], n, 3)[1] for n in range(1, 9)])


def test_expected_tokens_repeat_for_impossible_sizes() -> None:
    assert expected_tokens([0.5], 4, 2) == pytest.approx([1.0, 1.5, 1.75, 1.75, 1.75])


def test_hardware_aware_size_follows_latency() -> None:
    tokens = expected_tokens([0.6, 0.2, 0.1], 16, 4)
    assert hardware_aware_size(tokens, FLAT) == tokens.index(max(tokens))
    assert hardware_aware_size(tokens, STEEP) == 0
    step = {1: 1.0, 8: 1.0, 9: 5.0, 64: 5.0}
    assert hardware_aware_size(tokens, step) == 7, "the root has a row of its own"


def test_hardware_aware_size_interpolates_latency() -> None:
    assert hardware_aware_size([1.0, 1.4, 1.7, 1.9], {1: 1.0, 3: 2.0}) == 0
    assert hardware_aware_size([1.0, 1.6, 1.7, 1.9], {1: 1.0, 3: 2.0}) == 1
    assert hardware_aware_size([1.0, 1.4, 1.7, 1.9], {1: 1.0, 2: 1.0}) == 1


@pytest.mark.parametrize("seconds", [{}, {2: 1.0}, {1: 0.0}])
def test_hardware_aware_size_needs_one_row(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="1 row"):
        hardware_aware_size([1.0, 2.0], seconds)


def test_tree_size_follows_row_costs() -> None:
    sparse, static = GROWTHS["sparse_tree"], GROWTHS["static_tree"]
    assert sparse(TABLE, budget=6, seconds=STEEP).max_nodes == 1
    assert static(acceptance=[0.6, 0.2], budget=6, seconds=STEEP).max_nodes == 1
    with pytest.raises(ValueError, match="needs acceptance"):
        static(paths=[(0,)], seconds=FLAT)


@pytest.mark.parametrize("wrong", [{"ranks": []}, {"ranks": [[0.5], []]}, {"ranks": [[1.5]]},
    {"ranks": [[0.5]], "budget": 0}])  # fmt: skip
def test_sparse_tree_refuses_an_invalid_table(wrong: dict) -> None:
    with pytest.raises(ValueError, match="sparse_tree needs"):
        GROWTHS["sparse_tree"](**wrong)


def test_sparse_tree_has_the_best_paths_of_its_table() -> None:
    growth = GROWTHS["sparse_tree"]([[0.6, 0.1], [0.5]], budget=3)
    toy = Toy.random(3, 4, 3)
    draft, _ = step_of(growth, VERIFICATIONS["naive"], toy)(ForkingNoise([()]), 1)
    assert draft.parents.tolist() == [[ROOT, ROOT, 0]]


def test_static_tree_shrinks_with_more_sequences() -> None:
    growth = GROWTHS["static_tree"](acceptance=[0.6, 0.15, 0.06], budget=6, depth=3)

    def seconds(together: float) -> dict[int, float]:
        return {rows: 1.0 + max(0.0, together * rows - 8) for rows in range(1, 8)}

    parents = [-1, -1, 0]
    for _ in range(64):
        growth.observe([DraftOutcome(parents, [])] * 8, seconds)
    few = growth.max_nodes
    changes = sum(growth.observe([DraftOutcome(parents, [])], seconds) for _ in range(2000))
    assert few < 3
    assert growth.max_nodes == 6
    assert changes > 0
    assert GROWTHS["static_tree"](paths=[(0,)]).observe([DraftOutcome([-1], [0])] * 1000, seconds) is False


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_settings_predict_the_size_of_a_tree(
    budget: int, depth: int, acceptance: list[float], ranks: list[list[float]]
) -> None:
    for settings in (
        StaticTreeSettings(budget=budget, depth=depth, acceptance=tuple(acceptance)),
        SparseTreeSettings(budget=budget, ranks=tuple(map(tuple, ranks))),
    ):
        assert make_growth(settings).max_nodes == settings.max_nodes


@pytest.mark.parametrize("kind", GROWTH_SETTINGS)
def test_settings_predict_the_size_of_every_growth(kind: str) -> None:
    settings = GROWTH_SETTINGS[kind]()
    assert make_growth(settings).max_nodes == settings.max_nodes


def test_static_tree_forget_reaches_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[AcceptanceTable] = []
    monkeypatch.setattr(AcceptanceTable, "forget", lambda table: forgotten.append(table))
    growth = GROWTHS["static_tree"](acceptance=[0.6, 0.3], budget=4, depth=2)
    growth.forget()
    assert forgotten == [growth.table]
    GROWTHS["static_tree"](paths=[(0,), (1,)]).forget()
