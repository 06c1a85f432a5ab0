"""Writers that keep to a budget, each its own and all of a service together, on a real Redis."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import numpy as np
import pytest

from osd.capture.budget import BudgetShare
from osd.capture.reader import TraceReader
from osd.capture.streams import domains_in, stream_of
from osd.capture.tail import TraceTail
from osd.capture.trace import Array, encode
from osd.capture.writer import RecallWriter, TraceWriter
from osd.config import CaptureSettings, Settings
from osd.learning.batch import collate, cut

SETTINGS = CaptureSettings(max_records=100_000, max_queue=100_000, states="full")


@pytest.fixture
def read(redis_url):
    """Everything that is on the stream of the domain ``general``."""
    with closing(TraceReader(redis_url, SETTINGS, "general", "g", "c")) as reader:
        yield lambda: [given.record for given in reader.read(1000, 1000)]


@pytest.fixture
def drive(redis_url, make_trace, eventually):
    """Offers records for some seconds by writers of these demands in records a second; the bytes each wrote."""

    def run(seconds, *rates, **settings):
        writers = [
            TraceWriter(redis_url, SETTINGS.model_copy(update=settings), f"w{number}") for number in range(len(rates))
        ]
        trace = make_trace(padding=300)

        def offer(number):
            end, count = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                writers[number].offer(msgspec.structs.replace(trace, request_id=f"r{number}-{count}"))
                count += 1
                time.sleep(1 / rates[number])
            return count

        with ThreadPoolExecutor() as pool:
            offered = list(pool.map(offer, range(len(rates))))
        for writer in writers:
            writer.close(timeout=60)
        for writer, count in zip(writers, offered, strict=True):
            assert writer.counters()["written"] + writer.losses().get("budget", 0) == count
            assert writer.counters()["dropped"] == 0
        return [writer.bytes_written for writer in writers], offered

    return run


@pytest.mark.parametrize("more", [{}, {"service_bytes_per_second": 10**9}], ids=["alone", "with the service's"])
def test_a_writer_keeps_to_its_budget_and_records_say_what_they_stand_for(drive, read, make_trace, monkeypatch, more):
    monkeypatch.setattr("osd.capture.budget.SECONDS", 0.2)
    size = len(encode(make_trace(padding=300)))
    (written,), (offered,) = drive(1.2, 200, bytes_per_second=30 * size, **more)
    assert 0.5 * 36 * size < written < 1.6 * 36 * size
    weights = [record.weight for record in read()]
    assert len(weights) == round(written / size)
    assert min(weights) >= 1
    assert max(weights) > 3
    assert sum(weights) == pytest.approx(offered, rel=0.6)


def test_without_a_budget_all_is_written_and_counts_once(drive, read):
    _, (offered,) = drive(0.3, 100)
    assert [record.weight for record in read()] == [1.0] * offered


def test_all_writers_together_keep_to_the_budget_of_the_service_and_who_has_more_writes_more(
    drive, make_trace, monkeypatch
):
    monkeypatch.setattr("osd.capture.budget.SECONDS", 0.3)
    monkeypatch.setattr("osd.capture.budget.SHARE_SECONDS", 0.1)
    size = len(encode(make_trace(padding=300)))
    (busy, idle), _ = drive(2.0, 300, 60, service_bytes_per_second=45 * size)
    assert 0.6 * 90 * size < busy + idle < 1.5 * 90 * size
    assert 2 < busy / idle < 8


def test_parts_of_the_budget_add_up_to_all_of_it(redis_client, monkeypatch):
    monkeypatch.setattr("osd.capture.budget.SHARE_SECONDS", 3600.0)
    shares = [BudgetShare(redis_client, "osd:traces", name, 1000.0) for name in ("a", "b", "c")]
    assert all(share.due for share in shares)
    assert [share.look(0.0) for share in shares] == pytest.approx([1000, 1000 / 2, 1000 / 3])
    assert not any(share.due for share in shares)
    demands = [900.0, 100.0, 0.0]
    for _ in range(2):
        parts = [share.look(demand) for share, demand in zip(shares, demands, strict=True)]
    assert sum(parts) == pytest.approx(1000)
    assert parts == pytest.approx([1000 * (0.1 / 3 + 0.9 * 0.9), 1000 * (0.1 / 3 + 0.09), 1000 * 0.1 / 3])


@pytest.mark.parametrize(("age_ms", "counts"), [(4000, True), (6000, False)])
def test_a_writer_counts_for_five_seconds_after_its_last_look(redis_client, age_ms, counts):
    key, share = "osd:traces:demand", BudgetShare(redis_client, "osd:traces", "b", 1000.0)
    seconds, microseconds = redis_client.time()
    redis_client.hset(key, "a", f"{1000 * seconds + microseconds // 1000 - age_ms} 900")
    assert share.look(100.0) == pytest.approx(1000 * (0.1 / 2 + 0.09) if counts else 1000)
    assert redis_client.hkeys(key) == ([b"a", b"b"] if counts else [b"b"])
    assert 4000 < redis_client.pttl(key) <= 5000, "Redis forgets writers that all ended"


def test_every_reason_for_which_a_record_is_lost_has_a_count(redis_url, redis_server, make_trace, eventually):
    writer = TraceWriter(redis_url, SETTINGS.model_copy(update={"max_queue": 2}))
    writer.offer(msgspec.structs.replace(make_trace(), domain="no domain"))
    eventually(lambda: writer.losses() == {"encoding": 1})
    redis_server.close()
    writer.offer(make_trace())
    eventually(lambda: writer.losses() == {"encoding": 1, "redis": 1})
    redis_server.start()
    for _ in range(2):
        writer.close(timeout=60)
    assert writer.offer(make_trace()) is False
    assert writer.losses() == {"encoding": 1, "redis": 1, "closed": 1}
    assert writer.counters() == {"written": 0, "dropped": 3}


def test_hidden_states_are_written_in_8_bits_where_the_settings_say_so(redis_url, read, make_trace):
    trace = make_trace(padding=300)
    states = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    trace = msgspec.structs.replace(trace, hidden=Array.of(states))
    sizes = {}
    for way in ("full", "int8"):
        writer = TraceWriter(redis_url, SETTINGS.model_copy(update={"states": way, "bytes_per_second": 10**9}))
        writer.offer(trace)
        writer.offer(trace.without_states())
        writer.close(timeout=60)
        sizes[way] = writer.bytes_written
    full, without, rounded, same = read()
    assert (full, without) == (trace, same)
    assert sizes["full"] - sizes["int8"] > 0.6 * states.nbytes
    batch = collate([rounded])
    assert batch.hidden is not None
    np.testing.assert_allclose(batch.hidden[0, :6].numpy(), states, atol=0.02)
    part = cut(rounded, 4, 1)
    assert part.states is not None
    part.check()
    np.testing.assert_array_equal(part.states, batch.hidden[0, : len(part.states)].numpy())


def test_what_tables_learn_is_written_of_every_trace_to_the_stream_of_its_table(redis_url, redis_client, make_trace):
    recalled = Settings().recalled.model_copy(update={"max_queue": 1000})
    tables = RecallWriter(redis_url, recalled, "a", 8)
    small = SETTINGS.model_copy(update={"bytes_per_second": 1024})
    writer = TraceWriter(redis_url, small, "a", recalled=tables)
    trace = make_trace(padding=300)
    for number in range(60):
        domain = ("general", "code", "acme.sql")[number % 3]
        named = msgspec.structs.replace(trace, request_id=f"r{number}", domain=domain, drafter_domain="general")
        assert writer.offer(named)
    writer.close(timeout=60)
    assert writer.losses()["budget"] > 30
    # "code" has no drafter of its own and is served by the general one, whose table learns it.
    learnt = domains_in(redis_client, recalled.stream)
    lengths = {name: redis_client.xlen(stream_of(recalled.stream, name)) for name in learnt}
    assert lengths == {"general": 40, "acme.general": 20}
    tail = TraceTail(redis_url, recalled, "b")
    assert list(tail.new(["general"])) == []
    with closing(RecallWriter(redis_url, recalled, "a", 8)) as tables:
        tables.offer(msgspec.structs.replace(trace, request_id="general"))
        tables.offer(msgspec.structs.replace(trace, request_id="acme", domain="acme.general"))
    before = redis_client.info("stats")["total_net_output_bytes"]
    assert [one.request_id for one in tail.new(["general"])] == ["general"]
    assert redis_client.info("stats")["total_net_output_bytes"] - before < len(encode(trace)) / 2
    tail.close()


def test_a_record_of_which_nothing_can_be_made_is_a_counted_loss_and_the_next_one_is_written(
    redis_url, make_trace, eventually
):
    tables = RecallWriter(redis_url, Settings().recalled, "a", 8)
    tables.offer(msgspec.structs.replace(make_trace(), target_logp=Array("float16", (3, 2), b"")))
    eventually(lambda: tables.losses() == {"encoding": 1})
    tables.offer(make_trace())
    tables.close()
    assert tables.counters() == {"written": 1, "dropped": 1}
