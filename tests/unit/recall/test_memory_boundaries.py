"""Edges of recall's memory: entries of the first second, and a drafter that is the only source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from osd.recall.memory import OTHER, Backend, Heard, Other, Sought, mark_of
from osd.recall.native import NativeBackend
from osd.recall.reference import PlainBackend
from osd.runtime.native import quick_kernels

needs_kernels = pytest.mark.skipif(quick_kernels() is None, reason="the kernels were not built, or this CPU lacks AVX2")
BACKENDS = [pytest.param(NativeBackend(), id="kernel", marks=needs_kernels), pytest.param(PlainBackend(), id="python")]
VOCABULARY = 30
NOTHING = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drop_by_reader_keeps_entries_of_the_first_second(backend: Backend) -> None:
    memory, text = backend.memory(64), backend.text(16)
    text.append([1, 2, 3], certain=True)
    memory.hear(text, np.array([4, 5], np.int32), drafted=False, now=0)
    used = memory.used()
    assert used > 0
    assert memory.drop(reader=mark_of("another request")) == 0
    assert memory.drop() == 0
    assert memory.used() == used


@pytest.mark.parametrize("backend", BACKENDS)
def test_node_of_the_only_source_has_its_level_under_a_constraint(backend: Backend) -> None:
    """A constraint forbids what a trusted drafter prefers; the level of the rest stays that of the drafter."""
    memory = backend.memory(64)
    right = torch.tensor([[7, *[-1] * 7]]), torch.full((1, 8), 0.9)
    for _ in range(300):  # outside the memory and the text, so that the drafter is the only source
        text = backend.text(8)
        text.append([1], certain=False)
        heard = Heard([], [], torch.tensor([[7, 8]]), torch.tensor([[0.98, 0.02]]).log(), [7], right)
        memory.learn(text, heard, 0.0, None, 1000)

    def allowed(path: Sequence[int]) -> np.ndarray:
        return mask

    mask = np.zeros(VOCABULARY, np.bool_)
    mask[[12, 13]] = True
    ids, p = torch.tensor([[11, 12, *[-1] * 6]]), torch.tensor([[0.9, 0.05, *[0.0] * 6]])
    text = backend.text(8)
    text.append([29], certain=False)
    sought = Sought(memory, text, 1, 0.0, Other(NOTHING, ids, p), allowed=allowed, vocabulary=VOCABULARY)
    found = backend.drafting().draft([sought], 1, 0.0, chains=False)
    assert (found.tokens, found.levels) == ([12], [OTHER])
