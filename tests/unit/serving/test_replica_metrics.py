from __future__ import annotations

import copy

import pytest

from osd.engine.counters import APART, DOMAINS, OLDER, OTHERS, DecodeSeconds, EngineCounters, EngineLoad, of_version
from serving import prometheus, replica_metrics
from serving.replica_metrics import ReplicaMetrics, Report


def report(time, name="a", version=1, running=0, waiting=0, **counters):
    return Report(name, time, version, True, EngineLoad(running, waiting), 0.0, counters)


def test_totals_sum_over_replicas():
    metrics = ReplicaMetrics()
    metrics.push(report(100.1, "a", completion_tokens=5))
    metrics.push(report(100.2, "b", completion_tokens=7))
    metrics.push(report(101.1, "a", completion_tokens=6))
    totals = metrics.totals(101.5)
    assert totals.counters["completion_tokens"] == 13
    assert [living.replica for living in totals.replicas] == ["a", "b"]


def test_totals_do_not_go_backwards_when_a_replica_is_replaced():
    metrics = ReplicaMetrics()
    metrics.push(report(100, "a", requests=5))
    metrics.push(report(200, "b", requests=1))
    totals = metrics.totals(200.5)
    assert totals.counters["requests"] == 6
    assert [living.replica for living in totals.replicas] == ["b"]
    metrics.push(report(201, "b", requests=2))
    assert metrics.totals(201.5).counters["requests"] == 7


def versions_of(counters, name="a", time=100.0):
    """What a replica reports of its versions."""
    figures = {("version_tokens", *key): seconds.tokens for key, seconds in counters.seconds_by_version.items()}
    figures["completion_tokens"] = sum(figures.values())
    return Report(name, time, 1, True, EngineLoad(1, 0), 0.0, figures)


def test_no_total_falls_while_a_thousand_versions_come_and_go_in_replicas_that_come_and_go():
    metrics, expected = ReplicaMetrics(), 0
    replicas = {"a": EngineCounters(), "b": EngineCounters()}
    before = {}
    for version in range(1, 1001):
        for name in list(replicas):
            if version % 100 == 0 and name != "b":  # replaced
                del replicas[name]
                name = f"r{version}"
                replicas[name] = EngineCounters()
            served = 7 if name == "b" and version % 50 < 3 else version  # rolled back for a while
            of_version(replicas[name].seconds_by_version, ("general", served), DecodeSeconds).add(DecodeSeconds(5))
            expected += 5
            metrics.push(versions_of(replicas[name], name, 100.0 + version))
            totals = metrics.totals(0.0)
            now = totals.by_label("version_tokens")
            assert sum(now.values()) == totals.counters["completion_tokens"] == expected
            assert len(now) <= APART + 1
            assert all(value >= before.get(label, 0) for label, value in now.items())
            before = now
    assert now["general", OLDER] > 0.9 * expected


def test_no_total_falls_while_hundreds_of_domains_come_and_go_and_what_is_kept_is_bounded():
    metrics, expected, before = ReplicaMetrics(), 0, {}
    replicas = {"a": EngineCounters(), "b": EngineCounters()}
    for number in range(300):
        for name, counters in replicas.items():
            domain = f"d{number + 30 * (name == 'b')}"
            for version in (number, number + 1):
                of_version(counters.seconds_by_version, (domain, version), DecodeSeconds).add(DecodeSeconds(5))
            of_version(counters.seconds_by_version, ("general", number), DecodeSeconds).add(DecodeSeconds(5))
            expected += 15
            metrics.push(versions_of(counters, name, 100.0 + number))
        totals = metrics.totals(0.0)
        now = totals.by_label("version_tokens")
        assert sum(now.values()) == totals.counters["completion_tokens"] == expected
        assert len({domain for domain, _ in now} - {OTHERS}) <= DOMAINS
        assert all(value >= before.get(label, 0) for label, value in now.items())
        before = now
    assert now[OTHERS, OLDER] > 0.5 * expected
    assert len(prometheus.render(totals, "general", "tiny")) < 100_000
    assert all(len(second.counts) < 9 for second in metrics._past.seconds)


def test_versions_that_one_replica_no_longer_keeps_apart_stay_apart_while_others_count_them():
    metrics = ReplicaMetrics()
    one, other = EngineCounters(), EngineCounters()
    of_version(other.seconds_by_version, ("general", 1), DecodeSeconds).add(DecodeSeconds(7))
    for version in range(1, APART + 1):
        of_version(one.seconds_by_version, ("general", version), DecodeSeconds).add(DecodeSeconds(5))
    metrics.push(versions_of(one))
    metrics.push(versions_of(other, "b"))
    of_version(one.seconds_by_version, ("code", 1), DecodeSeconds).add(DecodeSeconds(1))
    of_version(one.seconds_by_version, ("general", APART + 1), DecodeSeconds).add(DecodeSeconds(5))
    assert ("general", 1) not in one.seconds_by_version
    metrics.push(versions_of(one))
    totals = metrics.totals(100.0).by_label("version_tokens")
    assert totals["general", 1] == 12
    assert totals["general", OLDER] == 5, "the second version was counted longest ago"
    assert totals["code", 1] == 1


def test_many_dead_replicas_are_forgotten_but_not_their_counts(monkeypatch):
    monkeypatch.setattr(replica_metrics, "_KNOWN", 256)
    metrics = ReplicaMetrics()
    for number in range(1000):
        metrics.push(report(float(number), f"r{number}", requests=1))
    assert metrics.totals(1000.0).counters["requests"] == 1000
    again = [copy.deepcopy(metrics) for _ in range(20)]
    for number, one in enumerate(again):  # who is forgotten counts from its beginning
        one.push(report(1000.0, f"r{50 * number}", requests=1))
    assert sum(one.totals(1000.0).counters["requests"] == 1001 for one in again) >= 14


def test_the_more_replicas_there_are_the_longer_each_pauses_and_all_of_them_count_as_living():
    metrics = ReplicaMetrics()
    assert metrics.push(report(99.0, "r0", requests=1)) == 1.0
    for number in range(1000):
        metrics.push(report(100.0 + number / 500, f"r{number}", requests=1))
    assert metrics.push(report(102.5, "r0", requests=2)) == pytest.approx(20.0, rel=0.01)
    totals = metrics.totals(180.0)
    assert (len(totals.replicas), totals.counters["requests"]) == (1000, 1001)
    assert metrics.totals(210.0).replicas == []


def test_history_gives_rates_and_ratios_for_each_bin():
    metrics = ReplicaMetrics()
    for second in range(10):
        metrics.push(
            Report(
                "a", 1000 + second + 0.5, 1, True, EngineLoad(2, 1), 0.0,
                {
                    "completion_tokens": 30 * (second + 1),
                    "rounds": 10 * (second + 1),
                    "drafted": 40 * (second + 1),
                    "accepted": 20 * (second + 1),
                    ("accepted_per_position", 0): 15 * (second + 1),
                    ("accepted_per_position", 1): 5 * (second + 1),
                    ("source_drafted", "recall"): 30 * (second + 1),
                    ("source_accepted", "recall"): 18 * (second + 1),
                    ("source_drafted", "eagle"): 10 * (second + 1),
                    ("source_accepted", "eagle"): 2 * (second + 1),
                },
            )
        )  # fmt: skip
    history = metrics.history(1010.0, 60)
    assert history.time == [float(second) for second in range(1000, 1010)]
    assert history.tokens_per_second == [30.0] * 10
    assert history.acceptance_rate == [0.5] * 10
    assert history.mean_acceptance_length == [3.0] * 10
    assert history.running == [2.0] * 10
    assert history.waiting == [1.0] * 10
    assert history.rounds == 100
    assert history.accepted_per_position == [150, 50]
    assert history.by_source == {"eagle": (100, 20), "recall": (300, 180)}
    coarse = metrics.history(1010.0, 60, bins=12)
    assert coarse.tokens_per_second == [30.0] * 2


def test_seconds_without_traffic_have_no_acceptance_rather_than_zero():
    metrics = ReplicaMetrics()
    metrics.push(report(1000.5, rounds=1, drafted=2, accepted=2, completion_tokens=3))
    metrics.push(report(1003.5, rounds=1, drafted=2, accepted=2, completion_tokens=3))
    history = metrics.history(1004.0, 60)
    assert history.acceptance_rate == [1.0, None, None, None]
    assert history.tokens_per_second == [3.0, 0.0, 0.0, 0.0]


def test_a_position_that_accepted_nothing_is_still_shown():
    metrics = ReplicaMetrics()
    metrics.push(Report("a", 1000.5, 1, True, EngineLoad(0, 0), 0.0, {"rounds": 2, ("accepted_per_position", 0): 0}))
    assert metrics.history(1002.0, 60).accepted_per_position == [0]


def test_without_a_report_the_history_is_empty():
    metrics = ReplicaMetrics()
    assert metrics.history(1000.0, 60).time == []
    assert metrics.totals(1000.0).replicas == []


@pytest.mark.parametrize("second_swap", [1001.2, 1030.0])
def test_a_swap_of_all_replicas_is_one_mark(second_swap):
    metrics = ReplicaMetrics()
    for name in "ab":
        metrics.push(report(1000.0, name, version=1))
    metrics.push(report(1001.0, "a", version=2))
    metrics.push(report(second_swap, "b", version=2))
    metrics.push(report(1050.0, "a", version=1))
    marks = metrics.history(1060.0, 600).swaps
    expected = [(1001.0, 2), (1050.0, 1)] if second_swap < 1005 else [(1001.0, 2), (1030.0, 2), (1050.0, 1)]
    assert marks == expected


def test_starting_with_a_version_is_no_swap():
    metrics = ReplicaMetrics()
    metrics.push(report(1000.0, "a", version=7))
    assert metrics.history(1001.0, 60).swaps == []


def test_history_is_bounded():
    metrics = ReplicaMetrics()
    for second in range(5000):
        metrics.push(report(float(second), requests=second))
    assert metrics.history(5000.0, 5000, bins=5000).time[0] == 5000 - 3600
    assert len(metrics.history(5000.0, 3600).time) <= 240


def test_a_clock_that_is_set_back_takes_the_past_with_it_once():
    metrics = ReplicaMetrics()
    for second in range(5):
        for name in ("a", "b"):
            metrics.push(report(5000.0 + second, name, completion_tokens=10 * (second + 1)))
    metrics.push(report(5004.2, "dead", completion_tokens=1))
    for second in range(5):
        for name in ("a", "b"):
            metrics.push(report(1405.0 + second, name, completion_tokens=50 + 10 * (second + 1)))
    history = metrics.history(1410.0, 60)
    assert history.time == [float(second) for second in range(1401, 1410)]
    assert history.tokens_per_second == [20, 20, 20, 20, 41, 20, 20, 20, 20]
    assert [one.replica for one in metrics.totals(1415.0).replicas] == []
    assert [one.replica for one in metrics.totals(1410.3).replicas] == ["a", "b"]


def test_replicas_whose_clocks_differ_set_nothing_back():
    metrics = ReplicaMetrics()
    for second in range(5):
        metrics.push(report(5000.0 + second, "ahead", completion_tokens=second))
        metrics.push(report(1000.0 + second, "behind", completion_tokens=second))
    assert metrics.history(5005.0, 60).time == [float(second) for second in range(5000, 5005)]
