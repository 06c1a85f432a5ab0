"""Draft trees on their way through a KV cache: what a row sees, and what a commit keeps."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd.drafters.rows import TreeRows
from osd.runtime import attention
from osd.runtime.kv_cache import KVCache
from osd.speculation.tree import ROOT, DraftBatch, Draw, TreeBuilder

WIDTH = 8
properties = settings(deadline=None, database=None, derandomize=True, max_examples=60)
trees = st.lists(st.integers(0, WIDTH), max_size=WIDTH).map(lambda raw: [v % (i + 1) - 1 for i, v in enumerate(raw)])
batches = st.lists(trees, min_size=1, max_size=3)


def grown(batch: list[list[int]]) -> TreeBuilder:
    builder = TreeBuilder(len(batch), WIDTH, None)
    for row, parents in enumerate(batch):
        for node, parent in enumerate(parents):
            place, q = builder.new_rows(1, WIDTH, torch.float32)
            q.fill_(1 / WIDTH)
            builder.add(torch.tensor([row]), torch.tensor([parent]), torch.tensor([node]), place)
    return builder


def empty_cache(slots: int, committed: int) -> KVCache:
    cache = KVCache(1, slots, 1, 40, 4, torch.float32, torch.device("cpu"))
    cache.length = [committed] * slots
    return cache


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


@properties
@given(batches)
def test_every_parent_comes_before_its_children_and_one_level_above(batch: list[list[int]]) -> None:
    draft: DraftBatch = grown(batch).finish(Draw.IID)
    depths = draft.depths()
    for row, node in draft.valid.nonzero().tolist():
        parent = int(draft.parents[row, node])
        assert ROOT <= parent < node
        assert int(depths[row, node]) == 1 + (int(depths[row, parent]) if parent != ROOT else 0)


@properties
@given(batches, st.integers(1, 20))
def test_a_node_sees_what_is_committed_its_ancestors_itself_and_nothing_else(
    batch: list[list[int]], committed: int
) -> None:
    builder, cache = grown(batch), empty_cache(len(batch), committed)
    packed, asked = TreeRows(builder, cache), []
    for slot, parents in enumerate(batch):
        for node in range(len(parents)):
            packed.node(slot, slot, node)
            asked.append((slot, node))
    if not asked:
        return
    rows = packed.rows()
    # Keys of 0 weigh all places that a row sees alike, and the first value of node i is 2 ** -(i + 1).
    places = torch.arange(40)
    for slot in range(len(batch)):
        cache.values[0, slot, 0, :, 0] = torch.exp2(-(places - committed + 1.0)) * (places >= committed)
        cache.values[0, slot, 0, :, 1] = 1.0 * (places < committed)
        cache.values[0, slot, 0, :, 2] = 100.0 * (places >= committed + len(batch[slot]))
    own = cache.values[0, rows.slots.long(), 0, rows.stores.long()][:, None]
    zero = torch.zeros(len(asked), 1, 4)
    seen = attention.prepare(rows, cache).attend(0, zero, zero, own, scale=1.0, window=None, softcap=0.0)[:, 0]
    for (slot, node), mean in zip(asked, seen, strict=True):
        path = path_to(batch[slot], node)
        count = committed + len(path)
        assert torch.allclose(mean[0] * count, torch.tensor([2.0 ** -(i + 1) for i in path]).sum(), atol=1e-5)
        assert torch.allclose(mean[1] * count, torch.tensor(float(committed)), atol=1e-4)
        assert abs(float(mean[2])) < 1e-6


@properties
@given(trees, st.integers(0, 20), st.randoms(use_true_random=False))
def test_a_commit_keeps_exactly_the_path(parents: list[int], start: int, random) -> None:
    cache = KVCache(2, 2, 1, 40, 4, torch.float32, torch.device("cpu"))
    marks = torch.arange(40.0)
    cache.keys[:] = marks[:, None]
    cache.values[:] = -marks[:, None]
    draft = grown([parents]).finish(Draw.IID)
    node = random.randint(ROOT, len(parents) - 1)
    path = [n for n in draft.path_of(torch.tensor([node]))[0].tolist() if n >= 0]
    assert path == path_to(parents, node)
    # The last committed token stands at ``start`` and node i right behind it, as a round feeds them.
    cache.keep(1, start, [0, *(1 + n for n in path)])
    expected = [*range(start + 1), *(start + 1 + n for n in path)]
    assert cache.length == [0, len(expected)]
    for layer in range(2):
        assert cache.keys[layer, 1, 0, : len(expected), 0].tolist() == expected
        assert cache.values[layer, 1, 0, : len(expected), 0].tolist() == [-float(place) for place in expected]
        assert cache.keys[layer, 0, 0, :, 0].tolist() == marks.tolist(), "the other slot is not touched"
