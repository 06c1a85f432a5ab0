from __future__ import annotations

import numpy as np
import torch

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED
from osd.learning.batch import DistillBatch, collate
from osd.learning.block_starts import block_starts
from tests.unit.learning.toys import make_trace, with_drafts

PROMPTS, LENGTH, REJECTIONS = (4, 6), 20, ((2, 9), (5,))


def batch() -> DistillBatch:
    """Return two sequences with rejected tokens at ``REJECTIONS`` of their completions."""
    traces = []
    for prompt, rejected in zip(PROMPTS, REJECTIONS, strict=True):
        trace = make_trace(str(prompt), prompt=prompt, completion=LENGTH, seed=prompt)
        verdict = np.full(LENGTH, ACCEPTED)
        verdict[::4] = NOT_DRAFTED
        verdict[[*rejected]] = REJECTED
        traces.append(with_drafts(trace, trace.completion_ids.numpy(), verdict))
    return collate(traces)


def chosen(most: int, step: int = 0) -> list[list[int]]:
    """Return the starts of each sequence, without the places that fill a row."""
    data = batch()
    starts = block_starts(data, most, step)
    assert torch.equal(starts, starts.sort(-1).values)
    last = data.token_ids.shape[1] - 1
    return [[start for start in row if start < last] for row in starts.tolist()]


REJECTED_STARTS = [[p + place - 1 for place in places] for p, places in zip(PROMPTS, REJECTIONS, strict=True)]


def test_rejected_positions_begin_the_first_blocks() -> None:
    assert chosen(3) == REJECTED_STARTS


def test_random_positions_begin_the_other_blocks() -> None:
    starts = chosen(12)
    assert sum(map(len, starts)) == 12
    for row, rejected, prompt in zip(starts, REJECTED_STARTS, PROMPTS, strict=True):
        assert set(rejected) <= set(row) <= set(range(prompt - 1, prompt + LENGTH - 1))
        assert len(set(row)) == len(row)
    assert starts == chosen(12)
    assert starts != chosen(12, step=1)


def test_every_position_begins_a_block_if_there_is_room() -> None:
    assert chosen(100) == [list(range(prompt - 1, prompt + LENGTH - 1)) for prompt in PROMPTS]


def test_block_without_context_is_left_out() -> None:
    starts = block_starts(collate([make_trace(prompt=1, completion=5)]), 100, 0)
    assert starts.tolist() == [[1, 2, 3, 4]]
    assert block_starts(collate([make_trace(prompt=1, completion=1)]), 100, 0).tolist() == [[1]]
