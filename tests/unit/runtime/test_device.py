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

    in_threads(compute)
    assert found == [cores]


def test_a_thread_that_starts_after_the_one_with_several_cores_has_one() -> None:
    found: list[int] = []
    in_threads(lambda: several_cores(2), lambda: found.append(torch.get_num_threads()))
    assert found == [1]


def in_threads(*steps: Callable[[], None]) -> None:
    """Do each step in a thread of its own, one after the other, and leave those to come as many cores as before."""
    before = torch.get_num_threads()
    for step in steps:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    torch.set_num_threads(before)
