"""Traces that replicas read from each other, in a real Redis server."""

from __future__ import annotations

from contextlib import closing

import pytest

from osd.capture.reader import TraceReader
from osd.capture.server import RedisServer
from osd.capture.streams import counter_key, stream_of
from osd.capture.tail import TraceTail
from osd.capture.writer import TraceWriter
from osd.config import CaptureSettings

SETTINGS = CaptureSettings(max_records=1000, max_queue=1000)
STREAM = stream_of(SETTINGS.stream, "general")


@pytest.fixture
def put(redis_url, make_trace, eventually, ends):
    """Write traces in the name of a replica and wait until they are on the stream."""
    writers = {}

    def put(replica, *names):
        if replica not in writers:
            writers[replica] = ends.enter_context(closing(TraceWriter(redis_url, SETTINGS, replica)))
        writer = writers[replica]
        goal = writer.counters()["written"] + len(names)
        for name in names:
            assert writer.offer(make_trace(name))
        eventually(lambda: writer.counters()["written"] == goal)

    return put


@pytest.fixture
def tail(redis_url, ends):
    return ends.enter_context(closing(TraceTail(redis_url, SETTINGS, "first")))


def names(tail):
    return [(trace.replica, trace.request_id) for trace in tail.new(["general"])]


def test_tail_returns_each_new_trace_of_other_replicas_once(put, tail):
    put("second", "before")
    assert names(tail) == []
    put("second", "a")
    put("first", "own")
    put("third", "b")
    assert names(tail) == [("second", "a"), ("third", "b")]
    assert names(tail) == []
    put("", "of an older version")
    assert names(tail) == [("", "of an older version")]


def test_tail_skips_own_traces_and_returns_later_ones(put, tail):
    assert names(tail) == []
    put("first", *(f"own {number}" for number in range(30)))
    put("second", "theirs")
    assert names(tail) == [("second", "theirs")]


def test_tail_leaves_traces_on_the_stream_for_the_trainer(put, tail, redis_url):
    assert names(tail) == []
    put("second", "a", "b")
    assert len(names(tail)) == 2
    reader = TraceReader(redis_url, SETTINGS, "general", "trainer", "c")
    assert [delivered.record.request_id for delivered in reader.read(9, 1000)] == ["a", "b"]
    reader.close()


def test_tail_skips_records_that_are_not_traces(put, tail, redis_client):
    assert names(tail) == []
    redis_client.xadd(STREAM, {"t": b"nothing"}, id="5-0")
    redis_client.set(counter_key(STREAM), 5)
    put("second", "a")
    assert names(tail) == [("second", "a")]


def test_tail_continues_after_a_restart_of_redis(put, tail, redis_server: RedisServer, eventually):
    put("second", "a")
    assert names(tail) == []
    redis_server.close()
    assert names(tail) == []
    redis_server.start()
    put("third", "b")
    seen = []
    eventually(lambda: seen.extend(names(tail)) or seen == [("third", "b")])
