from __future__ import annotations

import time
from contextlib import closing

import msgspec
import pytest

from osd.capture.reader import TraceReader
from osd.capture.retention import Retention, belongs
from osd.capture.streams import counter_key, index_key, stream_of
from osd.capture.trace import decode, encode
from osd.capture.writer import TraceWriter
from osd.config import CaptureSettings

DAY = 86_400.0
STREAM = stream_of(CaptureSettings().stream, "general")


def put(client, trace):
    """Write a trace without applying any limit."""
    put_bytes(client, encode(trace), trace.domain, trace.created)


def put_bytes(client, data, domain, made):
    stream = stream_of(CaptureSettings().stream, domain)
    number = client.incr(counter_key(stream))
    client.xadd(stream, {"t": data}, id=f"{number}-{int(1000 * made)}")
    client.zadd(index_key(CaptureSettings().stream), {domain: time.time_ns()})


def remaining(redis_url, settings):
    with closing(TraceReader(redis_url, settings, "general", "look", "look")) as reader:
        return [delivered.record.request_id for delivered in reader.read(1000, 1)]


def test_refused_records_are_purged_and_expire(redis_url, redis_client, make_trace):
    settings = CaptureSettings(keep_days=1)
    for name in ("a-0", "b-0", "b-1"):
        put(redis_client, aged(make_trace, name, 0.5))
    put_bytes(redis_client, b"junk", "general", time.time())
    with closing(TraceReader(redis_url, settings, "general", "look", "look")) as reader:
        for delivered in reader.read(10, 100):
            reader.refuse(delivered.place, "ValueError")
        refused, retention = "osd:traces:refused", Retention(redis_client, settings)
        assert redis_client.xlen(refused) == 4
        assert retention.purge("b") == 4, "two records and two copies"
        assert [decode(fields[b"t"]).request_id for _, fields in redis_client.xrange(refused)] == ["a-0"]
        retention.enforce(time.time() + DAY)
        assert redis_client.xlen(refused) == 0


def aged(make_trace, name, days, **more):
    return msgspec.structs.replace(make_trace(name, **more), created=time.time() - days * DAY)


def test_old_records_expire_behind_an_unreadable_record(redis_url, redis_client, make_trace):
    settings = CaptureSettings(keep_days=2.0)
    put_bytes(redis_client, b"broken", "general", time.time() - 9 * DAY)
    for name, days in (("a", 9), ("b", 2.1), ("c", 1.9), ("d", 0)):
        put(redis_client, aged(make_trace, name, days))
    assert Retention(redis_client, settings).enforce(time.time()) == 3
    assert remaining(redis_url, settings) == ["c", "d"]


def test_stream_above_its_size_keeps_the_newest_records(redis_url, redis_client, make_trace):
    settings = CaptureSettings(keep_mb=1)
    for number in range(40):
        put(redis_client, make_trace(str(number), padding=5000))
    assert redis_client.memory_usage(STREAM, samples=0) > 4 << 20
    deleted = Retention(redis_client, settings).enforce(time.time())
    assert (1 << 19) < redis_client.memory_usage(STREAM, samples=0) <= 1 << 20
    assert remaining(redis_url, settings) == [str(number) for number in range(deleted, 40)]


class RacingClient:
    """Client that deletes a stream after its length was read, as another process could."""

    def __init__(self, client, stream, after):
        self.client, self.stream, self.after, self.pipelines = client, stream, after, 0

    def __getattr__(self, name):
        return getattr(self.client, name)

    def pipeline(self, **options):
        self.pipelines += 1
        if self.pipelines > self.after:
            self.client.delete(self.stream)
        return self.client.pipeline(**options)


@pytest.mark.parametrize("after", [2, 3], ids=["sizes", "groups"])
def test_shrink_skips_a_stream_that_is_deleted_meanwhile(redis_client, make_trace, after):
    settings = CaptureSettings(keep_mb=1)
    for number in range(20):
        put(redis_client, make_trace(str(number), padding=5000))
    put_bytes(redis_client, b"other", "code", 1.0)
    client = RacingClient(redis_client, stream_of(settings.stream, "code"), after)
    assert Retention(client, settings).shrink() > 0
    assert client.pipelines > after
    assert redis_client.memory_usage(STREAM, samples=0) <= 1 << 20


def test_retention_without_limits_deletes_nothing(redis_client, make_trace):
    settings = CaptureSettings()
    put(redis_client, aged(make_trace, "a", 1000))
    assert Retention(redis_client, settings).enforce(time.time()) == 0
    assert redis_client.xlen(STREAM) == 1


def test_writer_deletes_old_and_excess_records(redis_url, redis_client, make_trace, eventually):
    settings = CaptureSettings(keep_days=2.0, keep_mb=1)
    put(redis_client, aged(make_trace, "old", 9))
    with closing(TraceWriter(redis_url, settings)) as writer:
        eventually(lambda: redis_client.xlen(STREAM) == 0)
        for number in range(20):
            writer.offer(aged(make_trace, str(number), 0, padding=5000))
        eventually(lambda: writer.counters() == {"written": 20, "dropped": 0})
        eventually(lambda: redis_client.memory_usage(STREAM, samples=0) <= 1 << 20)
        assert remaining(redis_url, settings)[-1] == "19"


def test_reader_deletes_old_records_without_a_writer(redis_url, redis_client, make_trace):
    settings = CaptureSettings(keep_days=2.0)
    put(redis_client, aged(make_trace, "old", 9))
    with closing(TraceReader(redis_url, settings, "general", "g", "c")) as reader:
        reader.sweep()
    assert redis_client.xlen(STREAM) == 0


def test_purge_of_a_response_deletes_all_its_choices(redis_url, redis_client, make_trace):
    settings = CaptureSettings()
    names = ["cmpl-1-0", "cmpl-12-0", "cmpl-1-1", "other", "cmpl-1-0"]
    for name in names * 4:
        put(redis_client, make_trace(name))
    retention = Retention(redis_client, settings)
    assert retention.purge("cmpl-1") == 12
    assert sorted(set(remaining(redis_url, settings))) == ["cmpl-12-0", "other"]
    assert retention.purge("cmpl-1") == 0


@pytest.mark.parametrize(("request_id", "purged_id", "belonging"), [
    ("a-0", "a", True), ("a-10", "a", True), ("a-0", "a-0", True), ("a-0", "a-", False), ("ab-0", "a", False),
    ("a", "a", True),
])  # fmt: skip
def test_record_belongs_to_its_request_and_its_response(request_id, purged_id, belonging):
    assert belongs(request_id, purged_id) is belonging
