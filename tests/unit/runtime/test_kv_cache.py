"""Slots of keys and values: a commit keeps the accepted entries in order."""

from __future__ import annotations

import pytest
import torch

from osd.runtime.kv_cache import KVCache


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache(2, 3, 2, 20, 4, torch.float32, torch.device("cpu"))
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=torch.Generator().manual_seed(0)))
    cache.values.copy_(-cache.keys)
    return cache


@pytest.mark.parametrize("offsets", [[], [0], [0, 1, 2], [0, 2], [1, 2, 5], [3], [0, 1, 4, 6]])
def test_keep_moves_a_path_behind_the_committed_tokens(cache: KVCache, offsets: list[int]) -> None:
    before = cache.keys.clone()
    cache.keep(1, 7, offsets)
    assert cache.length == [0, 7 + len(offsets), 0]
    for index, offset in enumerate(offsets):
        assert torch.equal(cache.keys[:, 1, :, 7 + index], before[:, 1, :, 7 + offset])
        assert torch.equal(cache.values[:, 1, :, 7 + index], -before[:, 1, :, 7 + offset])
    assert torch.equal(cache.keys[:, 1, :, :7], before[:, 1, :, :7])
    assert torch.equal(cache.keys[:, [0, 2]], before[:, [0, 2]]), "other slots do not change"


def test_clear_empties_a_slot_from_a_place_on() -> None:
    cache = KVCache(2, 3, 2, 4096, 4, torch.float32, torch.device("cpu"))
    for part in (cache.keys, cache.values):
        part.fill_(1)
    cache.length = [4000, 4000, 4000]
    cache.clear(1, 2048)
    assert cache.length == [4000, 2048, 4000]
    for part in (cache.keys, cache.values):
        assert part[:, [0, 2]].all()
        assert part[:, 1, :, :2048].all()
        # The pages at both ends may be shared.
        assert not part[:, 1, :, 2048 + 256 : 4096 - 256].any()
    cache.clear(1)
    assert cache.length[1] == 0


def test_bytes_of_counts_whole_pages_of_layers_and_heads() -> None:
    cache = KVCache(3, 2, 2, 4096, 4, torch.float32, torch.device("cpu"))
    assert cache.bytes_of(0) == 0
    assert cache.bytes_of(4096) >= cache.keys[:, 0].nbytes + cache.values[:, 0].nbytes
    assert cache.bytes_of(4096) - cache.bytes_of(2048) == 2 * 3 * 2 * 2048 * 16
