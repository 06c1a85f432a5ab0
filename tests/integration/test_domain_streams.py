"""Each domain has a stream of its own, and the bounds are those of all of them, on a real Redis."""

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
from osd.capture.streams import domains_in, group_of, index_key, look, stream_of
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
    """Writes traces, each given as (domain, name), by a writer that holds these bounds, and waits for them."""

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
        made = TraceReader(redis_url, SETTINGS, domain, group_of(domain), "trainer", **more)
        return ends.enter_context(closing(made))

    return make


def many(domain, count):
    return [(domain, f"{domain}-{number}") for number in range(count)]


def everything(reader, most=64):
    """What a reader is given until nothing comes, acknowledged."""
    found = []
    while batch := reader.read(most, 50):
        assert len(batch) <= most
        reader.ack([given.place for given in batch])
        found += [given.record.request_id for given in batch]
    return found


def kept(client):
    return {domain: client.xlen(stream_of(PREFIX, domain)) for domain in domains_in(client, PREFIX)}


def test_a_reader_is_given_its_own_domain_and_nothing_else_leaves_redis(write, reader, redis_client, redis_url):
    write([*many("general", 3), *many("code", 200)], padding=5000)
    small = reader("general")
    before = redis_client.info("stats")["total_net_output_bytes"]
    assert everything(small) == ["general-0", "general-1", "general-2"]
    record = 120_000  # bytes of 6 rows of 5,000 floats
    assert 3 * record < redis_client.info("stats")["total_net_output_bytes"] - before < 4 * record
    assert redis_client.xinfo_groups(stream_of(PREFIX, "code")) == []
    assert len(everything(reader("code"))) == 200


def test_who_learns_from_all_reads_the_domains_of_the_same_tenant_and_those_that_come_later(write, reader, monkeypatch):
    monkeypatch.setattr("osd.capture.reader._LOOK_SECONDS", 0.05)
    write([*many("general", 2), *many("code", 2), *many("acme.code", 2)])
    everyones, acmes = reader("general", tenant=True), reader("acme.general", tenant=True)
    assert sorted(everything(everyones, 3)) == ["code-0", "code-1", "general-0", "general-1"]
    assert everything(acmes) == ["acme.code-0", "acme.code-1"]
    write([*many("sql", 1), *many("acme.sql", 1)])
    assert (everything(everyones), everything(acmes)) == (["sql-0"], ["acme.sql-0"])
    assert everyones.waiting() == acmes.waiting() == (0, None)


def test_a_loud_domain_takes_no_more_than_others_leave(write, redis_client):
    write([*many("quiet", 5), *many("general", 40), *many("loud", 299)], max_records=64)
    # Looked at whenever a 32nd part was written since.
    assert kept(redis_client) == {"loud": 30, "general": 29, "quiet": 5}
    (newest_one,) = redis_client.xrevrange(stream_of(PREFIX, "loud"), count=1)
    assert b"loud-298" in newest_one[1][b"t"]


def test_of_more_domains_than_records_those_written_to_last_stay(write, redis_client):
    write([(f"d{number}", "r") for number in range(30)], max_records=10)
    assert {domain for domain, count in kept(redis_client).items() if count} == {f"d{n}" for n in range(20, 30)}
    Retention(redis_client, SETTINGS).enforce(time.time())
    assert len(kept(redis_client)) == 10, "no key stays of a stream that is empty and that nobody reads"
    assert len(redis_client.keys("osd:traces*")) == 2 * 10 + 1


def test_the_bound_in_bytes_is_that_of_all_streams(write, redis_client):
    write([*many("quiet", 2), *many("loud", 40)], padding=5000, keep_mb=1)
    sizes = {domain: state.bytes for domain, state in look(redis_client, PREFIX).items()}
    assert (1 << 19) < sum(sizes.values()) <= 1 << 20
    assert kept(redis_client)["quiet"] == 2


def test_the_age_limit_holds_in_every_domain_without_a_record_leaving_redis(write, redis_client, redis_url):
    write(many("code", 100), padding=5000, created=time.time() - 3 * DAY)
    write([*many("code", 1), *many("general", 1)], padding=5000)
    before = redis_client.info("stats")["total_net_output_bytes"]
    with connect(redis_url) as client:
        assert Retention(client, CaptureSettings(keep_days=2.0)).enforce(time.time()) == 100
    assert redis_client.info("stats")["total_net_output_bytes"] - before < 50_000
    assert kept(redis_client) == {"general": 1, "code": 1}


def test_lag_and_age_are_told_by_domain_and_without_a_record_leaving_redis(write, reader, redis_client, redis_url):
    write(many("code", 3), padding=5000, created=time.time() - 100)
    write(many("code", 2), padding=5000, created=time.time() - 50)
    write(many("general", 4))
    code = reader("code")
    batch = code.read(3, 1000)
    with connect(redis_url) as client:
        before = redis_client.info("stats")["total_net_output_bytes"]
        states = look(client, PREFIX)
        assert redis_client.info("stats")["total_net_output_bytes"] - before < 20_000
        assert (states["general"].records, states["general"].waiting) == (4, None)
        assert states["code"].records == 5
        waiting = states["code"].waiting
        assert waiting is not None
        assert waiting == code.waiting()
        assert waiting.records == 5
        assert waiting.age == pytest.approx(100, abs=5), "the oldest was given, and is not acknowledged"
        code.ack([given.place for given in batch])
        waiting = look(client, PREFIX)["code"].waiting
        assert waiting is not None
        assert waiting.records == 2
        assert waiting.age == pytest.approx(50, abs=5)
        everything(code)
        waiting = look(client, PREFIX)["code"].waiting
        assert waiting is not None
        assert (waiting.records, waiting.age) == (0, 0.0)


def test_the_newest_of_all_domains_come_in_the_order_in_which_they_were_made(write, redis_url):
    for age, domain in ((30, "code"), (20, "general"), (10, "code"), (0, "sql")):
        write([(domain, f"{domain}-{age}")], created=time.time() - age)
    assert [trace.request_id for trace in newest(redis_url, PREFIX, 4)] == ["sql-0", "code-10", "general-20", "code-30"]


def test_a_request_is_purged_in_every_domain(write, redis_client):
    write([("general", "mine-0"), ("sql", "mine-0"), ("code", "mine-1"), ("code", "other-0")])
    assert Retention(redis_client, SETTINGS).purge("mine") == 3
    assert kept(redis_client) == {"code": 1, "sql": 0, "general": 0}


def test_streams_lost_with_their_index_come_back_with_the_next_record(write, redis_client):
    write(many("general", 2))
    redis_client.delete(index_key(PREFIX))
    assert domains_in(redis_client, PREFIX) == []
    write(many("general", 1))
    assert kept(redis_client) == {"general": 3}


def test_osd_traces_list_and_osd_doctor_say_by_domain_what_waits_and_for_how_long(
    write, reader, redis_url, tmp_path, monkeypatch
):
    environment = {"OSD_HOME": str(tmp_path), "OSD_REDIS_URL": redis_url, "OSD_CAPTURE__MAX_RECORDS": "9"}
    listed = partial(CliRunner().invoke, app, env=environment)
    empty = listed(["traces", "list"])
    assert (empty.exit_code, empty.output) == (0, "nothing has been captured\n")
    write(many("code", 3))
    write(many("general", 6), created=time.time() - 100)
    reader("general").read(2, 1000)
    found = listed(["traces", "list", "--json"])
    general, code = (json.loads(line) for line in found.output.splitlines())
    assert (general["domain"], general["records"], general["lag"]) == ("general", 6, 6)
    assert general["bytes"] > 0
    assert 100 <= general["age"] < 110
    assert (code["domain"], code["records"], code["lag"], code["age"]) == ("code", 3, None, None)
    shown = listed(["traces", "list"])
    assert re.search(r"general +6 +0\.0 +6 +10\d s", shown.output), shown.output
    assert re.search(r"code +3 +0\.0 +nobody learns", shown.output), shown.output

    monkeypatch.setattr(findings, "_self_test", lambda settings: findings.Finding("self-test", "ok", ""))
    settings = load_settings(None, [], environment)
    (traces,) = [one for one in findings.findings(settings) if one.check == "traces"]
    assert traces.state == "warning"
    assert "records of general leave before they are learnt from: raise capture.max_records" in traces.says
    assert "code: 3 records, 0.0 MiB, no trainer reads them" in traces.says
    everything(reader("general"))
    (traces,) = [one for one in findings.findings(settings) if one.check == "traces"]
    assert traces.state == "ok"
    assert "general: 6 records, 0.0 MiB, none waits for the trainer" in traces.says


def test_shares_are_whole_and_fair_and_add_up_to_what_there_is():
    chance = random.Random(0)  # noqa: S311
    for _ in range(300):
        sizes = [chance.randrange(40) for _ in range(chance.randrange(1, 12))]
        most = chance.randrange(120)
        shares = [*fair_shares(dict(enumerate(sizes)), most).values()]
        assert sum(shares) == min(sum(sizes), most)
        assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
        cut = [share for share, size in zip(shares, sizes, strict=True) if share < size]
        if cut:
            assert max(cut) - min(cut) <= 1, "those that give have the same left"
            assert max(shares) <= min(cut) + 1, "and nobody has more"
    assert fair_shares({"a": 5, "b": 5, "c": 5}, 2) == {"a": 1, "b": 1, "c": 0}


@pytest.mark.parametrize("named", ["no domain", "osd:other", ""])
def test_a_record_of_no_valid_domain_is_a_counted_drop_and_makes_no_key(redis_url, redis_client, make_trace, named):
    writer = TraceWriter(redis_url, SETTINGS)
    writer.offer(msgspec.structs.replace(make_trace(), domain=named))
    writer.offer(make_trace("next"))
    writer.close(timeout=60)
    assert writer.counters() == {"written": 1, "dropped": 1}
    assert kept(redis_client) == {"general": 1}
