from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.backlog import Backlog, ClosedError
from osd.capture.trace import Array
from tests.traces import small_trace

TRACES = [small_trace(request_id=str(number)) for number in range(9)]
SIZE = TRACES[0].nbytes


def names(backlog):
    backlog.close()
    taken = []
    while not backlog.finished:
        taken.append(backlog.take(0.0).request_id)
    return taken


def test_a_record_is_as_large_as_its_arrays():
    larger = msgspec.structs.replace(TRACES[0], prompt_ids=Array.of(np.zeros(1004, np.int32)))
    assert larger.nbytes == SIZE + 4000


@pytest.mark.parametrize(("records", "most_bytes"), [(4, 99 * SIZE), (99, 4 * SIZE), (99, 5 * SIZE - 1)])
def test_the_oldest_make_room_for_the_newest(records, most_bytes):
    backlog = Backlog(records, most_bytes)
    assert [backlog.put(trace) for trace in TRACES] == [0] * 4 + [1] * 5
    assert names(backlog) == ["5", "6", "7", "8"]


def test_what_left_leaves_its_bytes_to_others():
    backlog = Backlog(99, 2 * SIZE)
    for trace in TRACES:
        assert backlog.put(trace) == 0
        assert backlog.take(0.0) is trace
    assert backlog.take(0.0) is None


def test_a_record_that_is_too_large_alone_is_kept_alone():
    backlog = Backlog(99, 1)
    assert [backlog.put(trace) for trace in TRACES[:3]] == [0, 1, 1]
    assert names(backlog) == ["2"]


def test_what_is_closed_takes_nothing_and_gives_what_it_has():
    backlog = Backlog(9, 9 * SIZE)
    backlog.put(TRACES[0])
    backlog.close()
    with pytest.raises(ClosedError):
        backlog.put(TRACES[1])
    assert not backlog.finished
    assert backlog.clear() == 1
    assert backlog.finished
