from __future__ import annotations

import copy

import pytest

from osd.engine.counters import MAX_DOMAINS, MAX_VERSIONS, OLDER_VERSIONS, OTHER_DOMAINS, EngineCounters, version_entry
from osd.metrics import SpeculationCounts
from serving.metrics import exposition, replicas
from serving.metrics.history import MetricsHistory
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report


def report(time, name="a", version=1, running=0, waiting=0, **counters):
    return Report(name, time, version, True, counters, {"running": running, "waiting": waiting})


def test_totals_do_not_fall_when_a_replica_is_replaced():
    metrics = ReplicaMetrics()
    metrics.push(report(100, "a", requests=5))
    metrics.push(report(200, "b", requests=1))
    totals = metrics.totals(200.5)
    assert totals.counters["requests"] == 6
    assert [live.replica for live in totals.replicas] == ["b"]
    metrics.push(report(201, "b", requests=2))
    assert metrics.totals(201.5).counters["requests"] == 7


def drafts(counters, drafted_by, tokens):
    version_entry(counters.by_version, drafted_by, SpeculationCounts).count({"recall": tokens}, [])


def versions_of(counters, name="a", time=100.0):
    """Return a replica's report with the counts of its versions."""
    figures = {("version_drafted", *key): counts.drafted for key, counts in counters.by_version.items()}
    figures["completion_tokens"] = sum(figures.values())
    figures |= {("version_some_bucket", *key, 2): counts.drafted for key, counts in counters.by_version.items()}
    return Report(name, time, 1, True, figures)


def test_totals_never_fall_over_a_thousand_versions():
    metrics, expected = ReplicaMetrics(), 0
    engines = {"a": EngineCounters(), "b": EngineCounters()}
    before = {}
    for version in range(1, 1001):
        for name in list(engines):
            if version % 100 == 0 and name != "b":  # replaced
                del engines[name]
                name = f"r{version}"
                engines[name] = EngineCounters()
            served = 7 if name == "b" and version % 50 < 3 else version  # rolled back for a while
            drafts(engines[name], ("general", served), 5)
            expected += 5
            metrics.push(versions_of(engines[name], name, 100.0 + version))
            totals = metrics.totals(0.0)
            now = totals.by_label("version_drafted")
            assert sum(now.values()) == totals.counters["completion_tokens"] == expected
            assert len(now) <= MAX_VERSIONS + 1
            assert all(value >= before.get(label, 0) for label, value in now.items())
            before = now
    assert now["general", OLDER_VERSIONS] > 0.9 * expected


def test_totals_of_many_domains_never_fall_and_are_bounded():
    metrics, expected, before = ReplicaMetrics(), 0, {}
    engines = {"a": EngineCounters(), "b": EngineCounters()}
    for number in range(300):
        for name, counters in engines.items():
            domain = f"d{number + 30 * (name == 'b')}"
            for version in (number, number + 1):
                drafts(counters, (domain, version), 5)
            drafts(counters, ("general", number), 5)
            expected += 15
            metrics.push(versions_of(counters, name, 100.0 + number))
        totals = metrics.totals(0.0)
        now = totals.by_label("version_drafted")
        assert sum(now.values()) == totals.counters["completion_tokens"] == expected
        assert len({domain for domain, _ in now} - {OTHER_DOMAINS}) <= MAX_DOMAINS
        assert totals.by_label("version_some_bucket") == {(*label, 2): value for label, value in now.items()}
        assert all(value >= before.get(label, 0) for label, value in now.items())
        before = now
    assert now[OTHER_DOMAINS, OLDER_VERSIONS] > 0.5 * expected
    assert len(exposition.render(totals, "general", "tiny")) < 100_000


def test_version_merged_in_a_replica_stays_separate_in_totals():
    metrics = ReplicaMetrics()
    first, second = EngineCounters(), EngineCounters()
    drafts(second, ("general", 1), 7)
    for version in range(1, MAX_VERSIONS + 1):
        drafts(first, ("general", version), 5)
    metrics.push(versions_of(first))
    metrics.push(versions_of(second, "b"))
    drafts(first, ("code", 1), 1)
    drafts(first, ("general", MAX_VERSIONS + 1), 5)
    assert ("general", 1) not in first.by_version
    metrics.push(versions_of(first))
    totals = metrics.totals(100.0).by_label("version_drafted")
    assert totals["general", 1] == 12
    assert totals["general", OLDER_VERSIONS] == 5, "the second version was counted longest ago"
    assert totals["code", 1] == 1


def test_counts_of_forgotten_replicas_stay(monkeypatch):
    monkeypatch.setattr(replicas, "_REMEMBERED", 256)
    metrics = ReplicaMetrics()
    for number in range(1000):
        metrics.push(report(float(number), f"r{number}", requests=1))
    assert metrics.totals(1000.0).counters["requests"] == 1000
    copies = [copy.deepcopy(metrics) for _ in range(20)]
    for number, each in enumerate(copies):  # a forgotten replica counts from zero
        each.push(report(1000.0, f"r{50 * number}", requests=1))
    assert sum(each.totals(1000.0).counters["requests"] == 1001 for each in copies) >= 14


def test_report_pause_grows_with_the_number_of_replicas():
    metrics = ReplicaMetrics()
    assert metrics.push(report(99.0, "r0", requests=1)) == 1.0
    for number in range(1000):
        metrics.push(report(100.0 + number / 500, f"r{number}", requests=1))
    assert metrics.push(report(102.5, "r0", requests=2)) == pytest.approx(20.0, rel=0.01)
    totals = metrics.totals(180.0)
    assert (len(totals.replicas), totals.counters["requests"]) == (1000, 1001)
    assert metrics.totals(210.0).replicas == []


def test_bins_sum_counters_and_average_gauges():
    metrics = ReplicaMetrics()
    for second in range(10):
        for name in "ab":
            counted = {"drafted": 40 * (second + 1), ("source_drafted", "recall"): 30 * (second + 1), "swaps": second}
            gauges = {"running": second, "waiting": 1, "memory": 0.5}
            metrics.push(Report(name, 1000 + second + 0.5, 1, True, counted, gauges))
    bins = metrics.bins(1010.0, 60, None)
    assert (bins.width, bins.time) == (1, list(range(1000, 1010)))
    assert bins.counts == {"drafted": [80.0] * 10, "source_drafted|recall": [60.0] * 10}, "swaps have no history"
    assert bins.gauges == {"running": [2.0 * second for second in range(10)], "waiting": [2.0] * 10}
    assert metrics.bins(1010.9, 60, 1007).time == [1008, 1009], "complete bins after the last known bin"
    assert metrics.bins(1010.0, 60, 1009).time == []
    wide = metrics.bins(1010.0, 900, None)
    assert (wide.width, wide.time) == (4, [1000, 1004])
    assert wide.counts["drafted"] == [320.0] * 2
    assert wide.gauges["running"] == [3.0, 11.0]


def test_old_seconds_are_joined_and_keep_sums_and_means():
    history = MetricsHistory()
    for second in range(2000):
        history.add(second, "a", {"drafted": 1, ("source_drafted", f"source {second // 700}"): 2}, {"running": second})
    assert len(list(history.seconds)) < 1100
    for window in (3600, 1800):
        bins = history.bins(2000.0, window)
        assert (bins.width, bins.time[-1]) == (15, 1980)
        assert bins.counts["drafted"] == [15.0] * len(bins.time)
        assert sum(sum(bins.counts[f"source_drafted|source {number}"]) for number in range(3)) == 30 * len(bins.time)
        assert bins.gauges["running"] == pytest.approx([start + 7 for start in bins.time])
    assert history.bins(2000.0, 3600, since=1500).time[0] == 1515
    assert history.bins(2000.0, 900).counts["drafted"] == [4.0] * 225


def test_joined_seconds_are_kept_when_the_clock_is_set_back():
    history = MetricsHistory()
    for second in range(5000, 7000):
        history.add(second, "a", {"drafted": 1}, {})
    assert history.set_back(6000.0) == 999
    for second in range(6001, 7000):
        history.add(second, "a", {"drafted": 1}, {})
    bins = history.bins(7000.0, 3600)
    assert bins.counts["drafted"][-66:] == [15.0] * 66
    assert sum(bins.counts["drafted"]) == pytest.approx(2999, abs=15)


def test_seconds_without_a_report_count_nothing():
    metrics = ReplicaMetrics()
    metrics.push(report(1000.5, drafted=2))
    metrics.push(report(1003.5, drafted=4))
    assert metrics.bins(1004.0, 60, None).counts["drafted"] == [2, 0, 0, 2]


def test_without_a_report_the_history_is_empty():
    metrics = ReplicaMetrics()
    assert metrics.bins(1000.0, 60, None).time == []
    assert metrics.totals(1000.0).replicas == []


@pytest.mark.parametrize("second_swap", [1001.2, 1030.0])
def test_swap_of_all_replicas_is_one_mark(second_swap):
    metrics = ReplicaMetrics()
    for name in "ab":
        metrics.push(report(1000.0, name, version=1))
    metrics.push(report(1001.0, "a", version=2))
    metrics.push(report(second_swap, "b", version=2))
    metrics.push(report(1050.0, "a", version=1))
    marks = metrics.bins(1060.0, 600, None).swaps
    expected = [(1001.0, 2), (1050.0, 1)] if second_swap < 1005 else [(1001.0, 2), (1030.0, 2), (1050.0, 1)]
    assert marks == expected


def test_clock_set_back_shifts_the_history_once():
    metrics = ReplicaMetrics()
    for second in range(5):
        for name in ("a", "b"):
            metrics.push(report(5000.0 + second, name, completion_tokens=10 * (second + 1)))
    metrics.push(report(5004.2, "dead", completion_tokens=1))
    for second in range(5):
        for name in ("a", "b"):
            metrics.push(report(1405.0 + second, name, completion_tokens=50 + 10 * (second + 1)))
    bins = metrics.bins(1410.0, 60, None)
    assert bins.time == list(range(1401, 1410))
    assert bins.counts["completion_tokens"] == [20, 20, 20, 20, 41, 20, 20, 20, 20]
    assert [live.replica for live in metrics.totals(1415.0).replicas] == []
    assert [live.replica for live in metrics.totals(1410.3).replicas] == ["a", "b"]


def test_differing_clocks_do_not_shift_the_history():
    metrics = ReplicaMetrics()
    for second in range(5):
        metrics.push(report(5000.0 + second, "ahead", completion_tokens=second))
        metrics.push(report(1000.0 + second, "behind", completion_tokens=second))
    assert metrics.bins(5005.0, 60, None).time == list(range(5000, 5005))
