from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch

from osd.runtime import memory
from osd.runtime.memory import PAGE, Pages, recycled

LARGE = (64, 8192)  # 2 MiB of float32


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> deque[np.ndarray]:
    blocks: deque[np.ndarray] = deque()
    monkeypatch.setattr(memory, "free", blocks)
    return blocks


def test_recycled_block_is_free_after_its_last_tensor(free: deque[np.ndarray]) -> None:
    tensor = recycled(LARGE, torch.float32)
    place, view = tensor.data_ptr(), tensor[3:5].flatten()
    del tensor
    assert not free
    second = recycled(LARGE, torch.float32)
    assert second.data_ptr() != place
    del view
    assert recycled(LARGE, torch.float32).data_ptr() == place


@pytest.mark.parametrize(
    ("shape", "dtype"), [(LARGE, torch.float32), ((4, 3, 100_000), torch.float64), ((3,), torch.float32)]
)
def test_recycled_tensor_has_the_given_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with torch.inference_mode():
        tensor = recycled(shape, dtype).fill_(1.5)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert float(tensor.sum()) == 1.5 * tensor.numel()


def test_recycled_drops_blocks_that_are_too_small(free: deque[np.ndarray]) -> None:
    small = [recycled(LARGE, torch.float32) for _ in range(3)]
    del small
    assert len(free) == 3
    large = recycled((200, 8192), torch.float32)
    assert not free
    del large
    smaller = recycled(LARGE, torch.float32)
    assert not free, "the larger block is used"
    del smaller
    assert len(free) == 1


def test_recycled_in_threads_returns_distinct_blocks() -> None:
    with ThreadPoolExecutor(2) as pool:
        tensors = list(pool.map(lambda i: recycled(LARGE, torch.float32).fill_(float(i)), range(8)))
    assert [float(tensor[0, 0]) for tensor in tensors] == list(range(8))
    assert len({tensor.data_ptr() for tensor in tensors}) == 8


MB = 1 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_pages_take_memory_when_written_until_released() -> None:
    start = resident()
    pages = Pages((64, MB), torch.int8, torch.device("cpu"))
    pages.in_small_pages()
    assert resident() - start < 8 * MB
    pages.tensor[:48] = 1
    assert resident() - start > 40 * MB
    pages.release(pages.tensor[16:48])
    assert 8 * MB < resident() - start < 24 * MB
    assert pages.tensor[:16].all(), "memory that was not released stays"
    assert not pages.tensor[16:].any(), "released memory is zero again"


def test_release_keeps_partly_covered_pages() -> None:
    pages = Pages((4 * PAGE,), torch.int8, torch.device("cpu"))
    pages.tensor[:] = 1
    pages.release(pages.tensor[PAGE // 2 : 3 * PAGE + 1])
    left = pages.tensor.view(4, PAGE).sum(1, dtype=torch.int64).tolist()
    assert left == [PAGE, 0, 0, PAGE]
    pages.release(pages.tensor[1 : PAGE - 1])
    assert pages.tensor[:PAGE].all()


def test_release_on_another_device_has_no_effect() -> None:
    pages = Pages((8,), torch.float32, torch.device("meta"))
    pages.release(pages.tensor[2:])
    assert pages.tensor.shape == (8,)
