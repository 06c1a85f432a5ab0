"""Streams of several domains and their common limits, in a real Redis server."""

from __future__ import annotations

import json
import random
import re
import time
from contextlib import closing
from functools import partial

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.doctor import findings
from osd.capture.reader import TraceReader
from osd.capture.retention import Retention, fair_shares
from osd.capture.streams import domains_in, group_of, index_key, stream_of, stream_states
from osd.capture.tail import newest
from osd.capture.writer import TraceWriter
from osd.cli.app import app
from osd.config import CaptureSettings, load_settings
from osd.redis_client import connect

DAY = 86_400.0
SETTINGS = CaptureSettings(max_queue=10_000, states="full")
PREFIX = SETTINGS.stream


@pytest.fixture
def write(redis_url, make_trace, eventually):
    """Write traces, given as (domain, name), with a writer of these limits, and wait for them."""

    def write(records, *, padding=2, created=None, **bounds):
        writer = TraceWriter(redis_url, SETTINGS.model_copy(update=bounds))
        for domain, name in records:
            at = time.time() if created is None else created
            writer.offer(msgspec.structs.replace(make_trace(name, padding=padding), domain=domain, created=at))
        writer.close(timeout=60)
        assert writer.counters() == {"written": len(records), "dropped": 0}

    return write


@pytest.fixture
def reader(redis_url, ends):
    def make(domain, **more):
        domain_reader = TraceReader(redis_url, SETTINGS, domain, group_of(domain), "trainer", **more)
        return ends.enter_context(closing(domain_reader))

    return make


def records_of(domain, count):
    return [(domain, f"{domain}-{number}") for number in range(count)]


def read_all(reader, limit=64):
    """Read and acknowledge all records of a reader; return their request ids."""
    ids = []
    while batch := reader.read(limit, 50):
        assert len(batch) <= limit
        reader.ack([delivered.place for delivered in batch])
        ids += [delivered.record.request_id for delivered in batch]
    return ids


def lengths(client):
    return {domain: client.xlen(stream_of(PREFIX, domain)) for domain in domains_in(client, PREFIX)}


def test_reader_loads_only_records_of_its_domain(write, reader, redis_client, redis_url):
    write([*records_of("general", 3), *records_of("code", 200)], padding=5000)
    small = reader("general")
    before = redis_client.info("stats")["total_net_output_bytes"]
    assert read_all(small) == ["general-0", "general-1", "general-2"]
    record = 120_000  # bytes of 6 rows of 5,000 floats
    assert 3 * record < redis_client.info("stats")["total_net_output_bytes"] - before < 4 * record
    assert redis_client.xinfo_groups(stream_of(PREFIX, "code")) == []
    assert len(read_all(reader("code"))) == 200


def test_tenant_reader_reads_old_and_new_domains_of_a_tenant(write, reader, monkeypatch):
    monkeypatch.setattr("osd.capture.reader._STREAMS_SECONDS", 0.05)
    write([*records_of("general", 2), *records_of("code", 2), *records_of("acme.code", 2)])
    general_tenant, acme_tenant = reader("general", tenant=True), reader("acme.general", tenant=True)
    assert sorted(read_all(general_tenant, 3)) == ["code-0", "code-1", "general-0", "general-1"]
    assert read_all(acme_tenant) == ["acme.code-0", "acme.code-1"]
    write([*records_of("sql", 1), *records_of("acme.sql", 1)])
    assert (read_all(general_tenant), read_all(acme_tenant)) == (["sql-0"], ["acme.sql-0"])
    assert general_tenant.waiting() == acme_tenant.waiting() == (0, None)


def test_busy_domain_leaves_a_fair_share_to_others(write, redis_client):
    write([*records_of("quiet", 5), *records_of("general", 40), *records_of("loud", 299)], max_records=64)
    # The writer trims after each 32nd of the limit, so the newest records come on top.
    assert lengths(redis_client) == {"loud": 30, "general": 29, "quiet": 5}
    (entry,) = redis_client.xrevrange(stream_of(PREFIX, "loud"), count=1)
    assert b"loud-298" in entry[1][b"t"]


def test_records_of_the_latest_domains_stay_within_the_limit(write, redis_client):
    write([(f"d{number}", "r") for number in range(30)], max_records=10)
    assert {domain for domain, count in lengths(redis_client).items() if count} == {f"d{n}" for n in range(20, 30)}
    Retention(redis_client, SETTINGS).enforce(time.time())
    assert len(lengths(redis_client)) == 10, "all keys of an empty stream without readers are deleted"
    assert len(redis_client.keys("osd:traces*")) == 2 * 10 + 1


def test_untrained_domains_share_one_part_of_the_limit(write, reader, redis_client):
    for domain in ("general", "sql"):
        reader(domain).read(1, 10)
    named = [(f"d{number}", "r") for number in range(511)]
    write([*records_of("sql", 20), *records_of("general", 500), *named], max_records=512)
    counts = lengths(redis_client)
    trained = {domain: counts.pop(domain) for domain in ("general", "sql")}
    assert trained == {"general": 246, "sql": 20}
    assert 246 <= sum(counts.values()) <= 246 + 16, "the writer trims after each 32nd of the limit"


def test_untrained_domains_share_one_part_of_the_bytes(write, reader, redis_client):
    reader("general").read(1, 10)
    write([*records_of("general", 6), *((f"d{number}", "r") for number in range(40))], padding=5000, keep_mb=1)
    general = stream_states(redis_client, PREFIX)["general"]
    half = 1 << 19
    assert general.bytes <= half < general.bytes * (general.records + 1) / general.records, "no further record fits"
    counts = lengths(redis_client)
    assert counts.pop("general") == general.records
    assert 1 <= sum(counts.values()) <= 5


def test_empty_streams_of_untrained_domains_are_deleted(write, reader, redis_client, monkeypatch):
    monkeypatch.setattr("osd.capture.reader._STREAMS_SECONDS", 0.05)
    general = reader("general", tenant=True)
    write([("general", "r"), *((f"d{number}", "r") for number in range(5))])
    assert len(read_all(general)) == 6
    redis_client.xtrim(stream_of(PREFIX, "general"), maxlen=0, approximate=False)
    for number in range(5):
        redis_client.xtrim(stream_of(PREFIX, f"d{number}"), maxlen=0, approximate=False)
    Retention(redis_client, SETTINGS).enforce(time.time())
    assert lengths(redis_client) == {"general": 0}
    write([("code", "later")])
    assert read_all(general) == ["later"], "the reader continues without the deleted streams"


def test_limit_in_bytes_covers_all_streams(write, redis_client):
    write([*records_of("quiet", 2), *records_of("loud", 40)], padding=5000, keep_mb=1)
    sizes = {domain: state.bytes for domain, state in stream_states(redis_client, PREFIX).items()}
    assert (1 << 19) < sum(sizes.values()) <= 1 << 20
    assert lengths(redis_client)["quiet"] == 2


def test_age_limit_deletes_without_loading_records(write, redis_client, redis_url):
    write(records_of("code", 100), padding=5000, created=time.time() - 3 * DAY)
    write([*records_of("code", 1), *records_of("general", 1)], padding=5000)
    before = redis_client.info("stats")["total_net_output_bytes"]
    with connect(redis_url) as client:
        assert Retention(client, CaptureSettings(keep_days=2.0)).enforce(time.time()) == 100
    assert redis_client.info("stats")["total_net_output_bytes"] - before < 50_000
    assert lengths(redis_client) == {"general": 1, "code": 1}


def test_stream_states_have_lag_and_age_without_loading_records(write, reader, redis_client, redis_url):
    write(records_of("code", 3), padding=5000, created=time.time() - 100)
    write(records_of("code", 2), padding=5000, created=time.time() - 50)
    write(records_of("general", 4))
    code = reader("code")
    batch = code.read(3, 1000)
    with connect(redis_url) as client:
        before = redis_client.info("stats")["total_net_output_bytes"]
        states = stream_states(client, PREFIX)
        assert redis_client.info("stats")["total_net_output_bytes"] - before < 20_000
        assert (states["general"].records, states["general"].waiting) == (4, None)
        assert states["code"].records == 5
        waiting = states["code"].waiting
        assert waiting is not None
        assert waiting == code.waiting()
        assert waiting.records == 5
        assert waiting.age == pytest.approx(100, abs=5), "the oldest record is delivered but not acknowledged"
        code.ack([given.place for given in batch])
        waiting = stream_states(client, PREFIX)["code"].waiting
        assert waiting is not None
        assert waiting.records == 2
        assert waiting.age == pytest.approx(50, abs=5)
        read_all(code)
        waiting = stream_states(client, PREFIX)["code"].waiting
        assert waiting is not None
        assert (waiting.records, waiting.age) == (0, 0.0)


def test_newest_traces_of_all_domains_are_ordered_by_time(write, redis_url):
    for age, domain in ((30, "code"), (20, "general"), (10, "code"), (0, "sql")):
        write([(domain, f"{domain}-{age}")], created=time.time() - age)
    assert [trace.request_id for trace in newest(redis_url, PREFIX, 4)] == ["sql-0", "code-10", "general-20", "code-30"]


def test_purge_deletes_a_request_in_every_domain(write, redis_client):
    write([("general", "purged-0"), ("sql", "purged-0"), ("code", "purged-1"), ("code", "other-0")])
    assert Retention(redis_client, SETTINGS).purge("purged") == 3
    assert lengths(redis_client) == {"code": 1, "sql": 0, "general": 0}


def test_stream_returns_to_a_lost_index_with_the_next_record(write, redis_client):
    write(records_of("general", 2))
    redis_client.delete(index_key(PREFIX))
    assert domains_in(redis_client, PREFIX) == []
    write(records_of("general", 1))
    assert lengths(redis_client) == {"general": 3}


def test_traces_list_and_doctor_report_the_lag_by_domain(write, reader, redis_url, tmp_path, monkeypatch):
    environment = {"OSD_HOME": str(tmp_path), "OSD_REDIS_URL": redis_url, "OSD_CAPTURE__MAX_RECORDS": "9"}
    listed = partial(CliRunner().invoke, app, env=environment)
    empty = listed(["traces", "list"])
    assert (empty.exit_code, empty.output) == (0, "nothing has been captured\n")
    write(records_of("code", 3))
    write(records_of("general", 6), created=time.time() - 100)
    reader("general").read(2, 1000)
    listing = listed(["traces", "list", "--json"])
    general, code = (json.loads(line) for line in listing.output.splitlines())
    assert (general["domain"], general["records"], general["lag"]) == ("general", 6, 6)
    assert general["bytes"] > 0
    assert 100 <= general["age"] < 110
    assert (code["domain"], code["records"], code["lag"], code["age"]) == ("code", 3, None, None)
    (only,) = listed(["traces", "list", "--json", "--domain", "code"]).output.splitlines()
    assert json.loads(only)["domain"] == "code"
    shown = listed(["traces", "list"])
    assert re.search(r"general +6 +0\.0 +6 +10\d s", shown.output), shown.output
    assert re.search(r"code +3 +0\.0 +no trainer", shown.output), shown.output

    monkeypatch.setattr(findings, "_self_test", lambda settings: findings.Finding("self-test", "ok", ""))
    settings = load_settings(None, [], environment)
    (traces,) = [finding for finding in findings.findings(settings) if finding.check == "traces"]
    assert traces.state == "warning"
    assert "records of general are dropped before training: raise capture.max_records" in traces.says
    assert "code: 3 records, 0.0 MiB, no trainer reads them" in traces.says
    read_all(reader("general"))
    (traces,) = [finding for finding in findings.findings(settings) if finding.check == "traces"]
    assert traces.state == "ok"
    assert "general: 6 records, 0.0 MiB, none waits for the trainer" in traces.says


def test_fair_shares_are_integers_that_add_up_to_the_limit():
    chance = random.Random(0)  # noqa: S311
    for _ in range(300):
        sizes = [chance.randrange(40) for _ in range(chance.randrange(1, 12))]
        limit = chance.randrange(120)
        shares = [*fair_shares(dict(enumerate(sizes)), limit).values()]
        assert sum(shares) == min(sum(sizes), limit)
        assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
        cut = [share for share, size in zip(shares, sizes, strict=True) if share < size]
        if cut:
            assert max(cut) - min(cut) <= 1, "all reduced shares are equal, up to the remainder"
            assert max(shares) <= min(cut) + 1, "no other share is larger"
    assert fair_shares({"a": 5, "b": 5, "c": 5}, 2) == {"a": 1, "b": 1, "c": 0}


@pytest.mark.parametrize("named", ["no domain", "osd:other", ""])
def test_record_with_an_invalid_domain_is_dropped(redis_url, redis_client, make_trace, named):
    writer = TraceWriter(redis_url, SETTINGS)
    writer.offer(msgspec.structs.replace(make_trace(), domain=named))
    writer.offer(make_trace("next"))
    writer.close(timeout=60)
    assert writer.counters() == {"written": 1, "dropped": 1}
    assert lengths(redis_client) == {"general": 1}
