from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as NoRedisError

from osd.economy.report import Comparison, Measured
from osd.engine.counters import EngineCounters, EngineLoad
from osd.metrics import SpeculationCounts
from osd.registry.replica_loads import DomainEffects, DomainWork
from serving.replica.reporter import LOAD_SECONDS, LoadReports, Reporter, Switches, TableSizes
from serving.replica.rollout_follower import Uptake
from tests.waiting import HANG_SECONDS


class Engine:
    """Replacement of an engine for a reporter."""

    drafter_version = 3
    canary_version = None
    pool = None
    measured = Measured(trials=20, drafted=100.0, plain=150.0, spent=0.5)

    def __init__(self):
        self.now = EngineLoad(1, 0)
        self.counts = EngineCounters(busy_by_domain={"general": 7.5}, busy_seconds=8.0, forwards=40, rows=90)
        self.speculates: list[bool] = []
        self.comparisons: dict[str, Comparison] = {}
        self.arrived = threading.Event()

    def wait_for_request(self, seconds):
        self.arrived.wait(seconds)
        self.arrived.clear()

    def load(self):
        return self.now

    def counters(self):
        return EngineCounters(**vars(self.counts))

    def set_speculation(self, enabled):
        self.speculates.append(enabled)


class Scene:
    """Load reports of an engine with a simulated clock; records every report and the switches."""

    def __init__(self):
        self.engine, self.uptake, self.now = Engine(), Uptake(), 1000.0
        self.reported, self.work, self.switched, self.read, self.failing = [], [], [], True, False
        self.effects = []
        switches = SimpleNamespace(get=lambda: Switches(speculation=False))
        self.reports = LoadReports("r1", self.engine, self.uptake, self, switches, self.switched.append)

    def report(self, name, load, work=None):
        if self.failing:
            raise NoRedisError
        self.reported.append(load)
        if work is not None:
            self.work.append(work)
        return self.read

    def report_effects(self, name, effects):
        self.effects.append(effects)

    def run(self, seconds):
        """Update the reports every 10 ms."""
        for _ in range(round(100 * seconds)):
            self.now += 0.01
            self.reports.update(self.now)


@pytest.fixture
def scene():
    scene = Scene()
    scene.run(0.01)
    return scene


def test_load_report_follows_the_queue_at_once(scene):
    for waiting in (2, 0, 1, 0):
        scene.engine.now = EngineLoad(8, waiting)
        scene.run(0.01)
        assert scene.reported[-1].waiting == waiting


def test_load_report_follows_the_first_and_last_running_request_at_once(scene):
    for running in (0, 3, 0, 1):
        scene.engine.now = EngineLoad(running, 0)
        scene.run(0.01)
        assert scene.reported[-1].running == running
    before = len(scene.reported)
    scene.engine.now = EngineLoad(2, 0)
    scene.run(0.01)
    assert len(scene.reported) == before


def test_load_is_reported_ten_times_a_second_to_a_trainer(scene):
    scene.run(1.0)
    assert len(scene.reported) - 1 == pytest.approx(1 / LOAD_SECONDS, abs=1)


def test_load_is_reported_once_a_second_without_a_trainer(scene):
    scene.read = False
    scene.run(LOAD_SECONDS + 0.02)
    before = len(scene.reported)
    scene.engine.now = EngineLoad(8, 2)
    scene.run(0.9)
    assert len(scene.reported) == before
    scene.run(0.2)
    assert [load.waiting for load in scene.reported[before:]] == [2]


def test_work_and_switches_are_exchanged_once_a_second(scene):
    scene.run(2.5)
    assert scene.work == 3 * [{"general": DomainWork(7.5)}]
    assert (scene.reported[-1].steps, scene.reported[-1].rows, scene.reported[-1].step_seconds) == (40, 90, 8.0)
    assert scene.switched == 3 * [False]


def test_effects_on_trial_are_reported_once_a_second(scene):
    scene.run(1.5)
    assert scene.effects == []
    comparison = Comparison(4, 3, scene.engine.measured)
    scene.engine.comparisons = {"general": (comparison,)}
    scene.run(2.0)
    assert scene.effects == 2 * [{"general": DomainEffects((comparison,))}]


def test_reports_continue_when_redis_is_back(scene):
    scene.failing = True
    scene.run(0.5)
    before, scene.failing = len(scene.reported), False
    scene.run(0.2)
    assert len(scene.reported) > before


def test_latency_and_speed_cover_the_last_report(scene):
    scene.engine.counts.token_seconds, scene.engine.counts.completion_tokens = 0.6, 20
    scene.run(LOAD_SECONDS + 0.01)
    assert scene.reported[-1].inter_token_ms == pytest.approx(30.0)
    assert scene.reported[-1].tokens_per_second == pytest.approx(20 / LOAD_SECONDS, rel=0.2)
    scene.run(LOAD_SECONDS + 0.01)
    assert scene.reported[-1].inter_token_ms == 0.0


def test_work_report_has_the_uptake_of_a_version(scene):
    scene.engine.counts.swaps, scene.engine.counts.swap_stall_seconds = 4, 0.02
    scene.uptake.add(0.3)
    scene.run(1.1)
    assert scene.work[-1]["general"].uptake == pytest.approx(0.3 + 0.005)


def reporter_of(engine, push=lambda report: 60.0, report=lambda *arguments: True):
    loads = SimpleNamespace(report=report)
    return Reporter("r1", engine, None, [], Uptake(), loads, SimpleNamespace(get=Switches), push)


def test_counters_are_pushed_after_the_returned_pause():
    pushed, fourth = [], threading.Event()

    def push(report):
        pushed.append(report)
        if len(pushed) < 4:
            return 0.01
        fourth.set()
        return 60.0

    reporter = reporter_of(Engine(), push)
    reporter.start()
    assert fourth.wait(HANG_SECONDS)
    reporter.close()
    assert len(pushed) == 5, "the last report is pushed on close"


def test_a_first_request_is_reported_at_once(monkeypatch):
    monkeypatch.setattr("serving.replica.reporter.POLL_SECONDS", HANG_SECONDS)
    reported, seen = [], threading.Semaphore(0)

    def report(name, load, *work):
        reported.append(load)
        seen.release()
        return True

    engine = Engine()
    engine.now = EngineLoad(0, 0)
    reporter = reporter_of(engine, report=report)
    reporter.start()
    engine.arrived.set()
    assert seen.acquire(timeout=HANG_SECONDS / 2)
    engine.now = EngineLoad(1, 0)
    engine.arrived.set()
    assert seen.acquire(timeout=HANG_SECONDS / 2)
    monkeypatch.undo()
    engine.arrived.set()
    reporter.close()
    assert [load.running for load in reported] == [0, 1]


def test_equal_speculation_switch_is_applied_once():
    engine = Engine()
    reporter = reporter_of(engine)
    for enabled in (False, False, True):
        reporter.set_speculation(enabled)
    assert engine.speculates == [False, True]


def test_report_counts_drafts_by_version_source_and_phase():
    engine = Engine()
    for version, source in ((3, "eagle"), (4, "eagle"), (4, "recall")):
        counts = engine.counts.by_version.setdefault(("general", version), SpeculationCounts())
        counts.count({source: 3}, [source, source])
    engine.counts.by_phase["thinking"] = SpeculationCounts(rounds=2, drafted=6, accepted=5)
    engine.counts.phase_tokens.update(thinking=7, answer=4)
    report = reporter_of(engine).report()
    counters = report.counters
    assert (report.gauges["running"], report.gauges["waiting"]) == (1, 0)
    assert (counters["rounds"], counters["drafted"], counters["accepted"]) == (3, 9, 6)
    assert (counters["version_drafted", "general", 3], counters["version_accepted", "general", 4]) == (3, 4)
    assert (counters["source_drafted", "eagle"], counters["source_accepted", "eagle"]) == (6, 4)
    assert [counters["phase_tokens", phase] for phase in ("thinking", "answer")] == [7, 4]
    assert [counters[f"phase_{name}", "thinking"] for name in ("rounds", "drafted", "accepted")] == [2, 6, 5]
    assert (report.gauges["speedup_drafted_seconds"], report.gauges["speedup_plain_seconds"]) == (100.0, 150.0)
    assert (report.gauges["speedup_trials"], counters["measuring_seconds"]) == (20, 0.5)


def test_table_sizes_are_counted_every_15_seconds():
    class Table:
        entries, reads = 100, 0

        def used(self):
            self.reads += 1
            return 30 + self.reads

    tables = {"general": [Table()], "acme.general": [Table(), Table()]}
    pool = SimpleNamespace(all_memories=lambda: {name: SimpleNamespace(tables=each) for name, each in tables.items()})
    sizes = TableSizes(SimpleNamespace(pool=pool))
    for now in (0.0, 14.9):
        assert sizes.read(now) == {"general": (31, 6400), "acme.general": (62, 12800)}
    assert sizes.read(15.0)["general"] == (32, 6400)
