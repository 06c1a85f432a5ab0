"""Budgets of a writer and of all writers of a service, in a real Redis server."""

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
    """Function that reads all records from the stream of the domain ``general``."""
    with closing(TraceReader(redis_url, SETTINGS, "general", "g", "c")) as reader:
        yield lambda: [given.record for given in reader.read(1000, 1000)]


@pytest.fixture
def drive(redis_url, make_trace, eventually):
    """Function that offers records at the given rates per second; it returns written bytes and offered records."""

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


@pytest.mark.parametrize("more", [{}, {"service_bytes_per_second": 10**9}], ids=["writer only", "writer and service"])
def test_writer_keeps_its_budget_and_weights_its_records(drive, read, make_trace, monkeypatch, more):
    monkeypatch.setattr("osd.capture.budget.SECONDS", 0.2)
    size = len(encode(make_trace(padding=300)))
    (written,), (offered,) = drive(1.2, 200, bytes_per_second=30 * size, **more)
    assert 0.5 * 36 * size < written < 1.6 * 36 * size
    weights = [record.weight for record in read()]
    assert len(weights) == round(written / size)
    assert min(weights) >= 1
    assert max(weights) > 3
    assert sum(weights) == pytest.approx(offered, rel=0.6)


def test_writer_without_a_budget_writes_all_with_weight_one(drive, read):
    _, (offered,) = drive(0.3, 100)
    assert [record.weight for record in read()] == [1.0] * offered


def test_writers_share_the_budget_of_the_service_by_demand(drive, make_trace, monkeypatch):
    monkeypatch.setattr("osd.capture.budget.SECONDS", 0.3)
    monkeypatch.setattr("osd.capture.budget.SHARE_SECONDS", 0.1)
    size = len(encode(make_trace(padding=300)))
    (busy, idle), _ = drive(2.0, 300, 60, service_bytes_per_second=45 * size)
    assert 0.6 * 90 * size < busy + idle < 1.5 * 90 * size
    assert 2 < busy / idle < 8


def test_budget_shares_add_up_to_the_budget(redis_client, monkeypatch):
    monkeypatch.setattr("osd.capture.budget.SHARE_SECONDS", 3600.0)
    shares = [BudgetShare(redis_client, "osd:traces", name, 1000.0) for name in ("a", "b", "c")]
    assert all(share.due for share in shares)
    assert [share.update(0.0) for share in shares] == pytest.approx([1000, 1000 / 2, 1000 / 3])
    assert not any(share.due for share in shares)
    demands = [900.0, 100.0, 0.0]
    for _ in range(2):
        parts = [share.update(demand) for share, demand in zip(shares, demands, strict=True)]
    assert sum(parts) == pytest.approx(1000)
    assert parts == pytest.approx([1000 * (0.1 / 3 + 0.9 * 0.9), 1000 * (0.1 / 3 + 0.09), 1000 * 0.1 / 3])


@pytest.mark.parametrize(("age_ms", "counts"), [(4000, True), (6000, False)])
def test_demand_of_a_writer_expires_after_five_seconds(redis_client, age_ms, counts):
    key, share = "osd:traces:demand", BudgetShare(redis_client, "osd:traces", "b", 1000.0)
    seconds, microseconds = redis_client.time()
    redis_client.hset(key, "a", f"{1000 * seconds + microseconds // 1000 - age_ms} 900")
    assert share.update(100.0) == pytest.approx(1000 * (0.1 / 2 + 0.09) if counts else 1000)
    assert redis_client.hkeys(key) == ([b"a", b"b"] if counts else [b"b"])
    assert 4000 < redis_client.pttl(key) <= 5000, "Redis forgets writers that all ended"


def test_lost_records_are_counted_by_reason(redis_url, redis_server, make_trace, eventually):
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


def test_hidden_states_are_written_in_8_bits_if_configured(redis_url, read, make_trace):
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


def test_recall_writer_writes_all_traces_to_their_domains(redis_url, redis_client, make_trace):
    recalled = Settings().recalled.model_copy(update={"max_queue": 1000})
    recall_writer = RecallWriter(redis_url, recalled, "a", 8)
    small = SETTINGS.model_copy(update={"bytes_per_second": 1024})
    writer = TraceWriter(redis_url, small, "a", recalled=recall_writer)
    trace = make_trace(padding=300)
    for number in range(60):
        domain = ("general", "code", "acme.sql")[number % 3]
        named = msgspec.structs.replace(trace, request_id=f"r{number}", domain=domain, drafter_domain="general")
        assert writer.offer(named)
    writer.close(timeout=60)
    assert writer.losses()["budget"] > 30
    # The domain "code" has no drafter, so the general drafter serves it and its cache learns from it.
    learnt = domains_in(redis_client, recalled.stream)
    lengths = {name: redis_client.xlen(stream_of(recalled.stream, name)) for name in learnt}
    assert lengths == {"general": 40, "acme.general": 20}
    tail = TraceTail(redis_url, recalled, "b")
    assert list(tail.new(["general"])) == []
    with closing(RecallWriter(redis_url, recalled, "a", 8)) as recall_writer:
        recall_writer.offer(msgspec.structs.replace(trace, request_id="general"))
        recall_writer.offer(msgspec.structs.replace(trace, request_id="acme", domain="acme.general"))
    before = redis_client.info("stats")["total_net_output_bytes"]
    assert [record.request_id for record in tail.new(["general"])] == ["general"]
    assert redis_client.info("stats")["total_net_output_bytes"] - before < len(encode(trace)) / 2
    tail.close()


def test_unusable_record_is_counted_and_the_next_is_written(redis_url, make_trace, eventually):
    recall_writer = RecallWriter(redis_url, Settings().recalled, "a", 8)
    recall_writer.offer(msgspec.structs.replace(make_trace(), target_logp=Array("float16", (3, 2), b"")))
    eventually(lambda: recall_writer.losses() == {"encoding": 1})
    recall_writer.offer(make_trace())
    recall_writer.close()
    assert recall_writer.counters() == {"written": 1, "dropped": 1}
