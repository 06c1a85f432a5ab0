"""Memory that comes as it is written and goes when it is given back."""

from __future__ import annotations

import psutil
import torch

from osd.runtime.memory import PAGE, Pages

MB = 1 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_memory_is_taken_as_it_is_written_and_given_back() -> None:
    start = resident()
    pages = Pages((64, MB), torch.int8, torch.device("cpu"))
    pages.in_small_pages()
    assert resident() - start < 8 * MB
    pages.tensor[:48] = 1
    assert resident() - start > 40 * MB
    pages.release(pages.tensor[16:48])
    assert 8 * MB < resident() - start < 24 * MB
    assert pages.tensor[:16].all(), "what was not given back stays"
    assert not pages.tensor[16:].any(), "what was given back is zero again"


def test_what_shares_a_page_with_others_stays() -> None:
    pages = Pages((4 * PAGE,), torch.int8, torch.device("cpu"))
    pages.tensor[:] = 1
    pages.release(pages.tensor[PAGE // 2 : 3 * PAGE + 1])
    left = pages.tensor.view(4, PAGE).sum(1, dtype=torch.int64).tolist()
    assert left == [PAGE, 0, 0, PAGE]
    pages.release(pages.tensor[1 : PAGE - 1])
    assert pages.tensor[:PAGE].all()


def test_a_device_without_pages_keeps_what_it_has() -> None:
    pages = Pages((8,), torch.float32, torch.device("meta"))
    pages.release(pages.tensor[2:])
    assert pages.tensor.shape == (8,)
