"""Draft trees in a KV cache: the places that a node sees."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osd.drafting.rows import TreeRows
from osd.runtime import attention
from osd.runtime.kv_cache import KVCache
from osd.verification.tree import ROOT, TreeBuilder

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
@given(batches, st.integers(1, 20))
def test_node_sees_committed_tokens_and_its_path(batch: list[list[int]], committed: int) -> None:
    builder, cache = grown(batch), empty_cache(len(batch), committed)
    packed, nodes = TreeRows(builder, cache), []
    for slot, parents in enumerate(batch):
        for node in range(len(parents)):
            packed.node(slot, slot, node)
            nodes.append((slot, node))
    if not nodes:
        return
    rows = packed.rows()
    # Keys of 0 give all visible places equal weight, and the first value of node i is 2 ** -(i + 1).
    places = torch.arange(40)
    for slot in range(len(batch)):
        cache.values[0, slot, 0, :, 0] = torch.exp2(-(places - committed + 1.0)) * (places >= committed)
        cache.values[0, slot, 0, :, 1] = 1.0 * (places < committed)
        cache.values[0, slot, 0, :, 2] = 100.0 * (places >= committed + len(batch[slot]))
    values = cache.values[0, rows.slots.long(), 0, rows.stores.long()][:, None]
    zero = torch.zeros(len(nodes), 1, 4)
    seen = attention.prepare(rows, cache).attend(0, zero, zero, values, scale=1.0, window=None, softcap=0.0)[:, 0]
    for (slot, node), mean in zip(nodes, seen, strict=True):
        path = path_to(batch[slot], node)
        count = committed + len(path)
        assert torch.allclose(mean[0] * count, torch.tensor([2.0 ** -(i + 1) for i in path]).sum(), atol=1e-5)
        assert torch.allclose(mean[1] * count, torch.tensor(float(committed)), atol=1e-4)
        assert abs(float(mean[2])) < 1e-6
