"""The cores that a thread computes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from osd.runtime.device import one_core, several_cores


@pytest.mark.parametrize(
    ("mine", "others", "cores"), [(lambda: several_cores(2), one_core, 2), (one_core, lambda: several_cores(2), 1)]
)
def test_what_other_threads_say_before_a_thread_computes_leaves_it_its_cores(
    mine: Callable[[], None], others: Callable[[], None], cores: int
) -> None:
    found: list[int] = []

    def compute() -> None:
        mine()
        other = threading.Thread(target=others)
        other.start()
        other.join()
        torch.ones(100_000).sum()
        found.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert found == [cores]
