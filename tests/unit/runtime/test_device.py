"""Number of cores that a thread computes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from osd.runtime.device import one_core, several_cores


@pytest.mark.parametrize(
    ("own_setting", "later_setting", "cores"),
    [(lambda: several_cores(2), one_core, 2), (one_core, lambda: several_cores(2), 1)],
)
def test_thread_keeps_its_cores_after_settings_of_other_threads(
    own_setting: Callable[[], None], later_setting: Callable[[], None], cores: int
) -> None:
    counts: list[int] = []

    def compute() -> None:
        own_setting()
        setter = threading.Thread(target=later_setting)
        setter.start()
        setter.join()
        torch.ones(100_000).sum()
        counts.append(torch.get_num_threads())

    in_threads(compute)
    assert counts == [cores]


def test_thread_started_after_several_cores_has_one_core() -> None:
    counts: list[int] = []
    in_threads(lambda: several_cores(2), lambda: counts.append(torch.get_num_threads()))
    assert counts == [1]


def in_threads(*steps: Callable[[], None]) -> None:
    """Run each step in a thread of its own, one after another, and restore the number of cores."""
    before = torch.get_num_threads()
    for step in steps:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    torch.set_num_threads(before)
