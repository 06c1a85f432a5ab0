from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd.verification import VERIFICATIONS
from osd.verification.noise import Noise
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder, repeats
from tests.unit.verification.enumeration import as_if, check_integrity

VOCABULARY = 12
settings.register_profile("osd", deadline=None, database=None, derandomize=True)
settings.load_profile("osd")

trees = st.lists(st.integers(0, 8), max_size=8).map(lambda raw: [value % (i + 1) - 1 for i, value in enumerate(raw)])
batches = st.lists(trees, min_size=1, max_size=4)


def ancestors_of(parents: list[int], node: int) -> list[int]:
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def build(batch: list[list[int]], support: torch.Tensor | None = None) -> DraftBatch:
    """Return trees with these parents, whose i-th token is column i; each addition adds a node to all sequences."""
    builder = TreeBuilder(len(batch), 8, support)
    kept: dict[tuple[int, int], int] = {}
    for node in range(max(map(len, batch))):
        rows = [row for row, parents in enumerate(batch) if len(parents) > node]
        parents = [batch[row][node] for row in rows]
        places = []
        for row, parent in zip(rows, parents, strict=True):
            if (row, parent) not in kept:
                place, q = builder.new_rows(1, VOCABULARY, torch.float32)
                q.fill_(1 / VOCABULARY)
                kept[row, parent] = int(place)
            places.append(kept[row, parent])
        builder.add(torch.tensor(rows), torch.tensor(parents), torch.full((len(rows),), node), torch.tensor(places))
    return builder.finish(Draw.WITHOUT_REPLACEMENT)


@given(batches)
def test_links_and_depths_follow_from_parents(batch: list[list[int]]) -> None:
    draft = build(batch)
    check_integrity(draft)
    first, following = draft.links()
    assert draft.sizes.tolist() == [len(parents) for parents in batch]
    mask, depths = draft.ancestors(), draft.depths()
    for row, parents in enumerate(batch):
        for node in range(draft.tokens.shape[1]):
            expected = ancestors_of(parents, node) if node < len(parents) else []
            assert mask[row, node].nonzero().flatten().tolist() == expected
            assert int(depths[row, node]) == len(expected)
        for owner in range(ROOT, len(parents)):
            children, child = [], int(first[row, owner + 1])
            while child >= 0:
                children.append(child)
                child = int(following[row, child])
            assert children == [node for node, parent in enumerate(parents) if parent == owner]


@given(batches, st.randoms(use_true_random=False))
def test_path_of_leads_from_the_root_to_the_node(batch: list[list[int]], random) -> None:
    draft = build(batch)
    nodes = [random.randint(ROOT, len(parents) - 1) for parents in batch]
    paths = draft.path_of(torch.tensor(nodes))
    for row, (parents, node) in enumerate(zip(batch, nodes, strict=True)):
        expected = ancestors_of(parents, node)
        assert paths[row].tolist() == expected + [-1] * (paths.shape[1] - len(expected))


@settings(max_examples=50)
@given(batches, st.integers(0, 10**6), st.sampled_from(["siblings", "traversal", "naive"]))
def test_rule_accepts_a_path_from_the_root(batch: list[list[int]], seed: int, rule: str) -> None:
    draft, count = build(batch), len(batch)
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(count, draft.tokens.shape[1] + 1, VOCABULARY, generator=generator).pow(4).softmax(-1)
    ids = torch.arange(count)
    verdict = VERIFICATIONS[rule].verify(draft, p, Noise(ids + seed, ids, ids))
    for row, parents in enumerate(batch):
        accepted = int(verdict.accepted[row])
        path = verdict.path[row].tolist()
        assert path[accepted:] == [-1] * (len(path) - accepted)
        assert path[:accepted] == (ancestors_of(parents, path[accepted - 1]) if accepted else [])
        assert 0 <= int(verdict.token[row]) < VOCABULARY


@given(st.lists(st.integers(0, 4), max_size=12))
def test_repeats_counts_earlier_equals(rows: list[int]) -> None:
    assert repeats(torch.tensor(rows, dtype=torch.int64)).tolist() == [
        rows[:i].count(row) for i, row in enumerate(rows)
    ]


def test_nodes_of_a_sequence_are_added_in_order() -> None:
    builder = TreeBuilder(2, 3, torch.tensor([10, 20, 30]))
    place, _ = builder.new_rows(2, 3, torch.float32)
    rows = torch.tensor([1, 0, 1])
    nodes = builder.add(rows, torch.full((3,), ROOT), torch.tensor([2, 0, 1]), place[rows])
    assert nodes.tolist() == [0, 0, 1]
    assert builder.tokens.tolist() == [[10, -1, -1], [30, 20, -1]]
    assert builder.depths.tolist() == [[1, 0, 0], [1, 1, 0]]


def test_empty_draft_has_no_nodes() -> None:
    draft = DraftBatch.empty(3)
    check_integrity(draft)
    assert draft.tokens.shape == (3, 0)
    assert draft.sizes.tolist() == [0, 0, 0]
    assert draft.links()[0].tolist() == [[-1]] * 3


def spoilt(**fields: torch.Tensor | None) -> DraftBatch:
    return replace(build([[-1, -1, 0]]), **fields)


@pytest.mark.parametrize(("draft", "message"), [
    (spoilt(parents=torch.tensor([[-1, 2, 0]])), "after its parent"),
    (spoilt(tokens=torch.tensor([[0, 5, 2]])), "column"),
    (spoilt(columns=torch.tensor([[0, 0, 2]]), tokens=torch.tensor([[0, 0, 2]])), "twice"),
    (spoilt(q_row=torch.tensor([[0, 1, 1]])), "different distributions"),
    (as_if(spoilt(q=torch.zeros(8, VOCABULARY)), Draw.IID), "probability 0"),
    (spoilt(draw=torch.tensor([[0, 1, 1]], dtype=torch.int8)), "in different ways"),
    (spoilt(q=None), "from no distribution"),
    (spoilt(q_row=torch.tensor([[0, 0, -1]])), "from no distribution"),
    (spoilt(source=torch.tensor([[0, 1, 0]], dtype=torch.int8)), "no source"),
    (spoilt(q_ids=torch.arange(VOCABULARY).expand(8, -1).flip(1)), "column"),
])  # fmt: skip
def test_integrity_check_names_the_problem(draft: DraftBatch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_integrity(draft)
