"""Rehearsal: a trace teaches a table the same as decoding its request."""

from __future__ import annotations

import numpy as np

from osd.capture.trace import Array
from osd.drafting.recall.rehearsal import rehearse
from osd.recall.memory import Backend, mark_of
from tests.traces import small_trace

PROMPT, DRAWN = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3] * 14


def trace():
    """Return a trace of seventy tokens with a target that was almost sure of each."""
    ids = np.array([[token, 77] for token in DRAWN], np.int32)
    logp = np.log(np.array([[0.9, 0.06]] * len(DRAWN), np.float16))
    return small_trace(
        request_id="r-0", created=2000.0, prompt_ids=Array.of(np.array(PROMPT, np.int32)),
        completion_ids=Array.of(np.array(DRAWN, np.int32)), target_ids=Array.of(ids), target_logp=Array.of(logp),
    )  # fmt: skip


def test_rehearse_teaches_the_distributions_of_a_trace(backend: Backend):
    memory, spare = backend.memory(1024), backend.text(128)
    spare.append([8, 8, 8], certain=True)  # remains of a previous trace
    assert sum(1 for _ in rehearse(memory, spare, trace())) == 3, "pauses for other threads"
    text = backend.text(64)
    text.append([8, *PROMPT], certain=False)
    ids, q = memory.predict(text, 2)
    assert ids == [9, 77]
    assert q[0] > 0.8
    text.append([9, 2, 6], certain=False)
    assert memory.predict(text, 1)[0] == [5]
    unknown = backend.text(64)
    unknown.append([8, 8, 8], certain=False)
    assert memory.predict(unknown, 1)[0] == []


def test_rehearsed_entries_have_the_age_and_mark_of_the_trace(backend: Backend):
    memory, spare = backend.memory(1024), backend.text(128)
    list(rehearse(memory, spare, trace()))
    used = memory.used()
    assert memory.drop(before=2000) == 0
    assert memory.drop(reader=mark_of("r")) == used > 0
    list(rehearse(memory, spare, trace()))
    assert memory.drop(before=2001) == used
