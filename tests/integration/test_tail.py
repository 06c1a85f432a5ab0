"""What replicas read of each other, with a real Redis."""

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
    """Writes traces in the name of a replica, and waits until they are on the stream."""
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
    return ends.enter_context(closing(TraceTail(redis_url, SETTINGS, "one")))


def names(tail):
    return [(trace.replica, trace.request_id) for trace in tail.new(["general"])]


def test_each_trace_of_others_comes_once_and_none_from_before(put, tail):
    put("two", "before")
    assert names(tail) == []
    put("two", "a")
    put("one", "own")
    put("three", "b")
    assert names(tail) == [("two", "a"), ("three", "b")]
    assert names(tail) == []
    put("", "of an older version")
    assert names(tail) == [("", "of an older version")]


def test_own_traces_do_not_hide_what_comes_after_them(put, tail):
    assert names(tail) == []
    put("one", *(f"own {number}" for number in range(30)))
    put("two", "theirs")
    assert names(tail) == [("two", "theirs")]


def test_the_trainer_gets_what_replicas_have_read(put, tail, redis_url):
    assert names(tail) == []
    put("two", "a", "b")
    assert len(names(tail)) == 2
    reader = TraceReader(redis_url, SETTINGS, "general", "trainer", "c")
    assert [delivered.record.request_id for delivered in reader.read(9, 1000)] == ["a", "b"]
    reader.close()


def test_what_is_no_trace_is_left_out(put, tail, redis_client):
    assert names(tail) == []
    redis_client.xadd(STREAM, {"t": b"nothing"}, id="5-0")
    redis_client.set(counter_key(STREAM), 5)
    put("two", "a")
    assert names(tail) == [("two", "a")]


def test_with_redis_gone_it_waits_and_goes_on_with_an_empty_one(put, tail, redis_server: RedisServer, eventually):
    put("two", "a")
    assert names(tail) == []
    redis_server.close()
    assert names(tail) == []
    redis_server.start()
    put("three", "b")
    seen = []
    eventually(lambda: seen.extend(names(tail)) or seen == [("three", "b")])
