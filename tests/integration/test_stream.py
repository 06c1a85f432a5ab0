"""Traces through a stream of a real Redis server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext

import msgspec
import pytest
import redis

from osd.capture.reader import MAX_REFUSED, TraceReader
from osd.capture.streams import counter_key, stream_of
from osd.capture.trace import Trace, decode, encode
from osd.capture.writer import StreamWriter, TraceWriter
from osd.config import CaptureSettings
from tests.waiting import HANG_SECONDS

SETTINGS = CaptureSettings(max_records=20, max_queue=8, states="full")
WIDE = CaptureSettings(max_records=10_000, max_queue=10_000, states="full")
STREAM = stream_of(SETTINGS.stream, "general")


@pytest.fixture
def writer(redis_url: str, ends: ExitStack) -> TraceWriter:
    return ends.enter_context(closing(TraceWriter(redis_url, WIDE)))


@pytest.fixture
def make_reader(redis_url: str, ends: ExitStack) -> Callable[..., TraceReader]:
    def make(consumer: str = "c", min_idle_ms: int = 60_000) -> TraceReader:
        reader = TraceReader(redis_url, WIDE, "general", "trainer", consumer, min_idle_ms=min_idle_ms)
        return ends.enter_context(closing(reader))

    return make


@pytest.fixture
def reader(make_reader: Callable[..., TraceReader]) -> TraceReader:
    return make_reader()


@pytest.fixture
def put(writer: TraceWriter, make_trace: Callable[..., Trace], eventually: Callable[..., None]):
    """Write traces with the given request ids and wait until they are on the stream."""

    def write(*names: str) -> None:
        goal = writer.counters()["written"] + len(names)
        for name in names:
            assert writer.offer(make_trace(name))
        eventually(lambda: writer.counters()["written"] == goal)

    return write


def names(batch) -> list[str]:
    return [delivered.record.request_id for delivered in batch]


def read_until(reader: TraceReader, count: int, seconds: float = 10.0) -> list[str]:
    """Read and acknowledge records until there are ``count`` of them, or the time is over."""
    ids: list[str] = []
    deadline = time.monotonic() + seconds
    while len(ids) < count and time.monotonic() < deadline:
        batch = reader.read(100, 100)
        reader.ack([delivered.place for delivered in batch])
        ids += names(batch)
    return ids


def test_reader_returns_offered_traces_in_order(put, reader: TraceReader, make_trace):
    put("a", "b", "c")
    batch = reader.read(2, 100)
    assert [delivered.record for delivered in batch] == [make_trace("a"), make_trace("b")]
    assert names(reader.read(2, 100)) == ["c"]
    assert reader.read(2, 0) == []


def test_read_without_records_waits_for_its_timeout(reader: TraceReader, put):
    started = time.monotonic()
    assert reader.read(1, 300) == []
    assert time.monotonic() - started > 0.25


def test_stream_is_bounded_and_keeps_the_newest_records(redis_url, redis_client, make_trace, make_reader):
    writer = TraceWriter(redis_url, CaptureSettings(max_records=20, max_queue=2000))
    for number in range(200):
        assert writer.offer(make_trace(str(number), padding=300))
    writer.close(timeout=60)
    assert writer.counters() == {"written": 200, "dropped": 0}
    assert redis_client.xlen(STREAM) == 20
    assert read_until(make_reader(), 20) == [str(number) for number in range(180, 200)]


@pytest.fixture
def hanging(redis_url: str) -> Iterator[tuple[StreamWriter[Trace], threading.Event]]:
    """Writer whose thread hangs in its first record until the event is set."""
    go = threading.Event()

    def encode_later(trace: Trace) -> bytes:
        go.wait(HANG_SECONDS)
        return encode(trace)

    writer = StreamWriter[Trace](redis_url, SETTINGS, encode_later, "traces")
    yield writer, go
    go.set()
    writer.close(timeout=60)


def test_full_queue_drops_and_counts_the_oldest_records(hanging, make_trace, make_reader):
    writer, go = hanging
    for number in range(30):
        assert writer.offer(make_trace(str(number)))
    go.set()
    writer.close(timeout=60)
    counted = writer.counters()
    assert sum(counted.values()) == 30
    kept = read_until(make_reader(), counted["written"])
    # The thread may already have taken one record.
    assert kept[-SETTINGS.max_queue :] == [str(number) for number in range(30 - SETTINGS.max_queue, 30)]
    assert len(kept) in (SETTINGS.max_queue, SETTINGS.max_queue + 1)


def test_record_with_an_extreme_time_is_written(redis_url: str, make_trace, make_reader):
    writer = TraceWriter(redis_url, WIDE)
    for created in (-1e300, 1e300):
        writer.offer(msgspec.structs.replace(make_trace(str(created)), created=created))
    writer.close(timeout=60)
    assert writer.counters() == {"written": 2, "dropped": 0}
    assert read_until(make_reader(), 2) == ["-1e+300", "1e+300"]


def test_close_returns_while_a_write_hangs_and_counts_all(hanging, make_trace, eventually):
    writer, go = hanging
    for _ in range(5):
        writer.offer(make_trace())
    writer.close(timeout=0.1)
    assert writer.losses()["closed"] >= 4, "the thread may have taken one record"
    go.set()
    eventually(lambda: sum(writer.counters().values()) == 5)


def test_capture_resumes_after_a_restart_of_redis(redis_server, put, writer, reader, make_trace, eventually):
    put("before")
    assert names(reader.read(1, 1000)) == ["before"]
    assert reader.waiting().records == 1
    redis_server.close()
    for _ in range(10):
        assert writer.offer(make_trace("lost"))
    eventually(lambda: writer.counters() == {"written": 1, "dropped": 10})
    assert reader.read(1, 200) == []
    assert reader.waiting().records == 1, "the last known value"
    redis_server.start()

    def written_again() -> bool:
        writer.offer(make_trace("after"))
        time.sleep(0.02)
        return writer.counters()["written"] > 1

    eventually(written_again)
    assert read_until(reader, 1)[:1] == ["after"]


def test_redis_out_of_memory_drops_records_and_frees_room(redis_url, redis_client, writer, make_trace, eventually):
    used = redis_client.info("memory")["used_memory"]
    redis_client.config_set("maxmemory", used + (4 << 20))
    for number in range(200):  # 48 KB each: about ten megabytes into four
        writer.offer(make_trace(str(number), padding=2000))
        eventually(lambda goal=number + 1: sum(writer.counters().values()) == goal)
    assert writer.counters()["dropped"] > 0

    def newest_is_kept() -> bool:
        writer.offer(make_trace("newest", padding=2000))
        time.sleep(0.02)
        return any(b"newest" in entry[b"t"] for _, entry in redis_client.xrevrange(STREAM, count=1))

    eventually(newest_is_kept)


def test_restarted_consumer_gets_its_pending_records_again(put, make_reader):
    put("a", "b", "c")
    crashed = make_reader("worker")
    first, *_ = crashed.read(2, 100)
    crashed.ack([first.place])
    successor = make_reader("worker")
    assert names(successor.read(5, 100)) == ["b"]
    assert names(successor.read(5, 100)) == ["c"]


def test_pending_records_of_a_dead_consumer_are_taken_over(put, make_reader):
    alive = make_reader("alive", min_idle_ms=50)
    assert alive.read(1, 1) == []
    put("a", "b")
    assert len(make_reader("dead").read(2, 100)) == 2
    time.sleep(0.06)
    assert sorted(read_until(alive, 2)) == ["a", "b"]


def test_pending_records_of_a_busy_consumer_stay_with_it(put, make_reader, redis_client: redis.Redis):
    put("a")
    busy = make_reader("busy", min_idle_ms=1)
    (delivered,) = busy.read(1, 100)
    redis_client.xclaim(STREAM, "trainer", "busy", 0, [delivered.place.id], idle=3_600_000, justid=True)
    time.sleep(0.01)
    assert busy.read(1, 1) == [], "a read by the busy consumer resets the idle time"
    assert make_reader("other", min_idle_ms=60_000).read(1, 100) == []


@pytest.fixture
def redis_outage(redis_client: redis.Redis, redis_url: str) -> Callable[[], AbstractContextManager[None]]:
    """Lock readers out of Redis without loss of data: disconnect them and refuse their password."""

    @contextmanager
    def outage() -> Iterator[None]:
        redis_client.config_set("requirepass", "changed")
        try:
            redis_client.client_kill_filter(_type="normal", skipme=True)
            yield
        finally:
            redis_client.config_set("requirepass", redis_url.partition("//:")[2].partition("@")[0])

    return outage


@pytest.mark.parametrize(("min_idle_ms", "has_outage"), [(20, False), (60_000, True)])
def test_record_in_flight_or_claimed_is_delivered_once(
    put, make_reader, redis_outage, eventually, min_idle_ms, has_outage
):
    put("a", "b", "c")
    make_reader("worker").read(3, 100)
    reader = make_reader("worker", min_idle_ms)
    deliveries = reader.read(1, 100)  # the reader has claimed the two other records
    with redis_outage() if has_outage else nullcontext():
        time.sleep(0.05)
        deliveries += reader.read(1, 10)
    eventually(lambda: deliveries.extend(reader.read(1, 50)) or len(deliveries) >= 3)
    time.sleep(0.05)
    assert names(deliveries + reader.read(3, 50)) == ["a", "b", "c"]
    reader.ack([delivered.place for delivered in deliveries])
    assert reader.waiting().records == 0


def test_acknowledged_record_is_not_delivered_again(put, make_reader):
    put("a", "b")
    reader = make_reader("worker")
    reader.ack([delivered.place for delivered in reader.read(2, 100)])
    reader.close()
    assert make_reader("worker", min_idle_ms=1).read(2, 100) == []


def test_lost_group_is_created_again_and_logged(put, reader, redis_client, caplog):
    put("a")
    (old,) = reader.read(1, 100)
    redis_client.flushall()
    put("b", "c")
    with caplog.at_level(logging.INFO, "osd.capture.reader"):
        assert read_until(reader, 2) == ["b", "c"]
    assert "consumer group trainer of osd:traces:domain:general is lost" in caplog.text
    assert "created from the oldest record" in caplog.text
    reader.ack([old.place])
    assert reader.waiting().records == 0


def test_acknowledgement_without_redis_is_sent_later(put, make_reader, redis_outage, redis_client, eventually):
    put("a")
    reader = make_reader("worker")
    (delivered,) = reader.read(1, 100)
    with redis_outage():
        reader.ack([delivered.place])
        assert reader.read(1, 10) == []
    assert redis_client.xpending(STREAM, "trainer")["pending"] == 1
    delivered_again = []

    def is_sent() -> bool:
        delivered_again.extend(names(reader.read(1, 50)))
        return redis_client.xpending(STREAM, "trainer")["pending"] == 0

    eventually(is_sent)
    assert delivered_again + names(reader.read(1, 0)) == [], "the record is acknowledged"


def test_undecodable_record_is_skipped_and_not_quoted(put, reader, redis_client, caplog):
    redis_client.xadd(STREAM, {"t": b"my private text"})
    redis_client.xadd(STREAM, {"other": b"my private text"})
    put("good")
    assert read_until(reader, 1) == ["good"]
    reader.read(1, 0)
    assert reader.waiting().records == 0
    assert "cannot be read" in caplog.text
    assert "private" not in caplog.text


def test_refused_records_are_kept_up_to_a_limit(put, reader: TraceReader, redis_client: redis.Redis, make_trace):
    large = encode(make_trace("large", padding=100_000))
    redis_client.xadd(STREAM, {"t": large})
    put("first")
    places = [delivered.place for delivered in reader.read(5, 100)]
    for _ in range(MAX_REFUSED):
        for place in places:
            reader.refuse(place, "TypeError")
    entries = redis_client.xrange("osd:traces:refused")
    assert len(entries) == MAX_REFUSED
    kept, without_record = entries[-1][1], entries[-2][1]
    assert (kept[b"stream"], kept[b"id"], kept[b"reason"]) == (STREAM.encode(), places[1].id.encode(), b"TypeError")
    assert decode(kept[b"t"]).request_id == "first"
    assert set(without_record) == {b"stream", b"id", b"reason"}
    assert reader.waiting().records == 0, "refused records are acknowledged"


def test_record_of_another_format_is_skipped_with_advice(put, reader, redis_client, make_trace, caplog):
    redis_client.xadd(STREAM, {"t": encode(msgspec.structs.replace(make_trace(), format=2))})
    put("good")
    assert names(reader.read(5, 100)) == ["good"]
    reader.close()
    assert redis_client.xpending(STREAM, "trainer")["pending"] == 1, "the last skipped record is acknowledged"
    assert "is skipped: the record has format 2 and this build reads format 1: let only one build" in caplog.text


@pytest.mark.parametrize(("consumer", "min_idle_ms"), [("dead", 60_000), ("alive", 20)], ids=["same", "another"])
def test_trimmed_record_of_a_dead_consumer_is_acknowledged(put, make_reader, redis_client, consumer, min_idle_ms):
    put("a", "b", "c")
    make_reader("dead").read(3, 100)
    redis_client.xtrim(STREAM, maxlen=1, approximate=False)
    time.sleep(0.03)
    successor = make_reader(consumer, min_idle_ms)
    assert read_until(successor, 1) == ["c"]
    assert successor.waiting().records == 0


def test_waiting_counts_undelivered_and_pending_records(put, reader: TraceReader, redis_client: redis.Redis):
    assert reader.waiting().records == 0
    put(*"abcde")
    assert reader.waiting().records == 5
    batch = reader.read(2, 100)
    assert reader.waiting().records == 5
    reader.ack([batch[0].place])
    assert reader.waiting().records == 4
    redis_client.xtrim(STREAM, maxlen=1, approximate=False)
    assert reader.waiting().records == 1 + 1


def test_stream_survives_foreign_entries_and_a_lost_counter(redis_url: str, put, reader, redis_client, make_trace):
    put("a")
    redis_client.xadd(STREAM, {"t": b""}, id=f"{int(time.time() * 1000) + 3}-7")
    time.sleep(0.01)
    put("b")
    redis_client.delete(counter_key(STREAM))
    time.sleep(0.01)
    second_writer = TraceWriter(redis_url, WIDE)
    second_writer.offer(make_trace("c"))
    second_writer.close()
    assert second_writer.counters() == {"written": 1, "dropped": 0}
    put("d")
    assert read_until(reader, 4) == ["a", "b", "c", "d"]
