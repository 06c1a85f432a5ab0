"""A trace teaches a table what the target said, as if the request had been decoded beside it."""

from __future__ import annotations

import numpy as np

from osd.capture.trace import Array
from osd.drafting.recall.rehearsal import rehearse
from osd.recall.memory import Backend, mark_of
from tests.traces import small_trace

PROMPT, DRAWN = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3] * 14


def trace():
    """Seventy tokens that the target was almost sure of."""
    ids = np.array([[token, 77] for token in DRAWN], np.int32)
    logp = np.log(np.array([[0.9, 0.06]] * len(DRAWN), np.float16))
    return small_trace(
        request_id="r-0",
        created=2000.0,
        prompt_ids=Array.of(np.array(PROMPT, np.int32)),
        completion_ids=Array.of(np.array(DRAWN, np.int32)),
        target_ids=Array.of(ids),
        target_logp=Array.of(logp),
    )


def test_what_was_said_elsewhere_is_said_here(backend: Backend):
    memory, spare = backend.memory(1024), backend.text(128)
    spare.append([8, 8, 8], certain=True)  # of the trace before
    assert sum(1 for _ in rehearse(memory, spare, trace())) == 3, "so often others have their turn"
    text = backend.text(64)
    text.append([8, *PROMPT], certain=False)
    ids, q = memory.says(text, 2)
    assert ids == [9, 77]
    assert q[0] > 0.8
    text.append([9, 2, 6], certain=False)
    assert memory.says(text, 1)[0] == [5]
    unknown = backend.text(64)
    unknown.append([8, 8, 8], certain=False)
    assert memory.says(unknown, 1)[0] == []


def test_it_is_as_old_as_the_trace_and_goes_when_its_request_is_purged(backend: Backend):
    memory, spare = backend.memory(1024), backend.text(128)
    list(rehearse(memory, spare, trace()))
    used = memory.used()
    assert memory.drop(before=2000) == 0
    assert memory.drop(reader=mark_of("r")) == used > 0
    list(rehearse(memory, spare, trace()))
    assert memory.drop(before=2001) == used
