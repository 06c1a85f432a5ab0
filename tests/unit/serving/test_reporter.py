from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from osd.demand import Demand, Workload
from osd.engine.counters import DecodeSeconds, EngineCounters, EngineLoad
from osd.metrics import SpeculationCounts
from serving.replica.reporter import LOAD_SECONDS, Reporter, Switches
from serving.replica.rollout_follower import Uptake


class Engine:
    """What a reporter reads of an engine."""

    drafter_version = 3
    canary_version = None
    pool = None

    def __init__(self):
        self.now = EngineLoad(1, 0)
        self.counts = EngineCounters(seconds_by_version={("general", 3): DecodeSeconds(7, 0.5, 0.25)})

    def load(self):
        return self.now

    def counters(self):
        return EngineCounters(**vars(self.counts))

    def workloads(self):
        return {"general": Workload(0.5, Demand(((0, 1, 2.0),), 90.0, 0.001), ((1.0, 1.1),))}

    def set_speculation(self, enabled):
        pass


class Loads:
    """Keeps every report with its time."""

    def __init__(self):
        self.reported, self.workloads, self.read = [], [], True

    def report(self, name, load, workloads=None):
        self.reported.append((time.monotonic(), load))
        if workloads is not None:
            self.workloads.append((time.monotonic(), workloads))
        return self.read


class Control:
    def get(self):
        return Switches()


@pytest.fixture
def scene():
    engine, loads = Engine(), Loads()
    reporter = Reporter("r1", engine, None, [], Uptake(), loads, Control(), lambda report: 1.0)  # type: ignore[arg-type]
    reporter.start()
    yield engine, loads, reporter
    reporter.close()


def test_waiting_requests_are_told_at_once_and_that_none_waits_any_more_too(scene):
    engine, loads, _ = scene
    for waiting in (2, 0, 1, 0):
        engine.now = EngineLoad(8, waiting)
        changed = time.monotonic()
        while not loads.reported or loads.reported[-1][1].waiting != waiting:
            assert time.monotonic() - changed < 0.08, "the load was reported too late"
            time.sleep(0.001)


def test_what_is_asked_of_the_engine_is_told_once_a_second(scene):
    engine, loads, _ = scene
    time.sleep(1.3)
    assert [said for _, said in loads.workloads] == 2 * [engine.workloads()]


def test_a_load_that_does_not_change_is_told_regularly(scene):
    _, loads, _ = scene
    time.sleep(6 * LOAD_SECONDS)
    assert 3 <= len(loads.reported) <= 7


def test_where_no_trainer_looks_a_load_is_told_once_a_second(scene):
    engine, loads, _ = scene
    loads.read = False
    time.sleep(2 * LOAD_SECONDS)
    before = len(loads.reported)
    engine.now = EngineLoad(8, 2)
    time.sleep(1.25)
    assert [load.waiting for _, load in loads.reported[before:]] == [2]


def test_counters_are_pushed_as_often_as_they_are_asked_for():
    pushed = []

    def push(report):
        pushed.append(time.monotonic())
        return 0.05 if len(pushed) < 4 else 60.0

    reporter = Reporter("r1", Engine(), None, [], Uptake(), Loads(), Control(), push)  # type: ignore[arg-type]
    reporter.start()
    deadline = time.monotonic() + 20
    while len(pushed) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1.2)
    assert len(pushed) == 4
    reporter.close()
    assert len(pushed) == 5


def test_the_latency_is_that_of_the_tokens_since_the_report_before(scene):
    engine, loads, _ = scene
    while not loads.reported:
        time.sleep(0.001)
    engine.counts.token_seconds, engine.counts.completion_tokens = 0.6, 20
    while loads.reported[-1][1].inter_token_ms == 0:
        time.sleep(0.001)
    assert loads.reported[-1][1].inter_token_ms == pytest.approx(30.0)
    time.sleep(2.5 * LOAD_SECONDS)
    assert loads.reported[-1][1].inter_token_ms == 0.0


def test_workloads_say_what_a_new_version_takes_the_replica(scene):
    engine, loads, reporter = scene
    engine.counts.swaps, engine.counts.swap_stall_seconds = 4, 0.02
    reporter._uptake.add(0.3)
    loads.workloads.clear()
    while not loads.workloads:
        time.sleep(0.001)
    assert loads.workloads[-1][1]["general"].uptake == pytest.approx(0.3 + 0.005)


def test_a_report_has_the_seconds_of_each_version(scene):
    counters = scene[2].report().counters
    assert counters["version_tokens", "general", 3] == 7
    assert counters["version_plain_seconds", "general", 3] == 0.5
    assert counters["version_decode_seconds", "general", 3] == 0.25


def test_a_report_counts_drafts_by_version_and_by_source(scene):
    engine, _, reporter = scene
    for version, source in ((3, "eagle"), (4, "eagle"), (4, "recall")):
        counts = engine.counts.by_version.setdefault(("general", version), SpeculationCounts())
        counts.count({source: 3}, [source, source])
    counters = reporter.report().counters
    assert (counters["rounds"], counters["drafted"], counters["accepted"]) == (3, 9, 6)
    assert (counters["version_drafted", "general", 3], counters["version_accepted", "general", 4]) == (3, 4)
    assert (counters["source_drafted", "eagle"], counters["source_accepted", "eagle"]) == (6, 4)
    assert (counters["source_drafted", "recall"], counters["source_accepted", "recall"]) == (3, 2)


def test_a_report_says_how_much_the_tables_of_each_domain_hold_and_counts_that_now_and_then(monkeypatch):
    class Table:
        entries, looks = 100, 0

        def used(self):
            self.looks += 1
            return 30 + self.looks

    tables = {"general": [Table()], "acme.general": [Table(), Table()]}
    engine = Engine()
    engine.pool = SimpleNamespace(  # type: ignore[assignment]
        others=dict, recalled=lambda: {domain: SimpleNamespace(tables=mine) for domain, mine in tables.items()}
    )
    reporter = Reporter("r1", engine, None, [], Uptake(), Loads(), Control(), lambda report: 1.0)  # type: ignore[arg-type]
    for _ in range(3):
        told = reporter.report().gauges
    assert (told["recall_entries", "general"], told["recall_bytes", "general"]) == (31, 6400)
    assert (told["recall_entries", "acme.general"], told["recall_bytes", "acme.general"]) == (62, 12800)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 20)
    assert reporter.report().gauges["recall_entries", "general"] == 32
