"""Sampling of records within a budget of bytes per second, and the queue of records."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from osd.capture.backlog import Backlog, ClosedError
from osd.capture.budget import SECONDS, RecordSampler
from osd.capture.trace import Array
from tests.clocks import Clock
from tests.traces import small_trace


@dataclass(frozen=True)
class SizedRecord:
    """Record with a size and a score."""

    nbytes: int
    score: float = 1.0
    domain: str = "general"
    created: float = 0.0


def draw(budget, clock, records, rate, name=""):
    """Offer ``rate`` records per second; return their weights, None for records that were not kept."""
    weights = []
    for number, record in enumerate(records):
        clock.now += 1 / rate
        weights.append(budget.weight(record, f"{name}{number}", record.nbytes))
    return weights


def test_budget_above_the_traffic_keeps_all_with_weight_one():
    clock = Clock()
    budget = RecordSampler(100_000, lambda record: record.score, clock)
    records = [SizedRecord(1000, score) for score in (0.2, 1.0, 0.5) * 500]
    assert draw(budget, clock, records, rate=90) == [1.0] * 1500


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_budget_keeps_its_bytes_per_second_over_minutes(share):
    clock, chance = Clock(), np.random.default_rng(0)
    records = [SizedRecord(int(size), float(score)) for size, score in chance.uniform((500, 0.2), (5000, 1), (8000, 2))]
    offered = sum(record.nbytes for record in records)
    budget = RecordSampler(share * offered / 80, lambda record: record.score, clock)
    weights = draw(budget, clock, records, rate=100)
    taken = sum(record.nbytes for record, weight in zip(records, weights, strict=True) if weight is not None)
    assert 0.9 * share * offered < taken < share * offered + budget.rate * SECONDS


def test_budget_in_a_burst_takes_little_more_than_its_reserve():
    clock = Clock()
    budget = RecordSampler(20_000, lambda record: record.score, clock)
    draw(budget, clock, [SizedRecord(1000)] * 2000, rate=100, name="calm")
    burst = draw(budget, clock, [SizedRecord(1000)] * 10_000, rate=1000, name="burst")
    taken = 1000 * sum(weight is not None for weight in burst)
    assert 0.9 * 10 < taken / 20_000 < 10 + 2 * SECONDS


def test_budget_keeps_valuable_records_more_often():
    clock = Clock()
    budget = RecordSampler(10_000, lambda record: record.score, clock)
    records = [SizedRecord(1000, score) for score in (0.2, 0.8) * 4000]
    weights = draw(budget, clock, records, rate=100)
    low, high = ([weight for weight in weights[place::2] if weight is not None] for place in (0, 1))
    assert len(high) == pytest.approx(4 * len(low), rel=0.15)
    assert np.mean(low) == pytest.approx(4 * np.mean(high), rel=0.15)


def test_budget_weights_estimate_totals_under_changing_load():
    clock, errors = Clock(), []
    for seed in range(20):
        chance = np.random.default_rng(seed)
        budget = RecordSampler(5000, lambda record: record.score, clock)
        total = estimate = variance = 0.0
        for phase in range(6):
            records = [
                SizedRecord(int(size), float(score)) for size, score in chance.uniform((200, 0.2), (3000, 1), (800, 2))
            ]
            weights = draw(budget, clock, records, rate=float(chance.choice([5, 20, 200])), name=f"{seed} {phase} ")
            total += sum(record.nbytes for record in records)
            for record, weight in zip(records, weights, strict=True):
                if weight is not None:
                    estimate += weight * record.nbytes
                    variance += weight * (weight - 1) * record.nbytes**2
        errors.append((estimate - total) / variance**0.5)
    print("mean and spread of (estimate - true) / standard error:", np.mean(errors), np.std(errors))
    assert abs(np.mean(errors)) < 4 / len(errors) ** 0.5
    assert 0.6 < np.std(errors) < 1.5


def test_budget_demand_covers_the_last_seconds_by_score():
    clock = Clock()
    budget = RecordSampler(1000, lambda record: record.score, clock)
    budget.weight(SizedRecord(1000), "first", 1000)
    assert budget.demand == pytest.approx(1051, rel=0.01), "the first record counts for a second"
    draw(budget, clock, [SizedRecord(1000, 0.5)] * 20_000, rate=100)
    assert budget.demand == pytest.approx(50_000, rel=0.01)
    clock.now += 20 * SECONDS
    assert budget.demand < 1


def test_budget_weight_is_at_most_ten_thousand():
    clock = Clock()
    weights = draw(
        RecordSampler(1e-6, lambda record: record.score, clock), clock, [SizedRecord(10**6)] * 50_000, rate=100
    )
    assert max(weight for weight in weights if weight is not None) == pytest.approx(10_000)


def test_budget_draw_of_a_record_is_deterministic():
    first_budget, second_budget = (RecordSampler(1000, lambda record: record.score, Clock()) for _ in range(2))
    weights = [first_budget.weight(SizedRecord(1000), f"r{n}", 1000) for n in range(200)]
    assert weights == [second_budget.weight(SizedRecord(1000), f"r{n}", 1000) for n in range(200)]
    assert 0 < sum(weight is not None for weight in weights) < 200


TRACES = [small_trace(request_id=str(number)) for number in range(9)]
SIZE = TRACES[0].nbytes


def names(backlog):
    backlog.close()
    taken = []
    while not backlog.finished:
        taken.append(backlog.take(0.0).request_id)
    return taken


def test_record_size_is_the_size_of_its_arrays():
    larger = msgspec.structs.replace(TRACES[0], prompt_ids=Array.of(np.zeros(1004, np.int32)))
    assert larger.nbytes == SIZE + 4000


@pytest.mark.parametrize(("records", "max_bytes"), [(4, 99 * SIZE), (99, 4 * SIZE), (99, 5 * SIZE - 1)])
def test_full_backlog_drops_the_oldest_records(records, max_bytes):
    backlog = Backlog(records, max_bytes)
    assert [backlog.put(trace) for trace in TRACES] == [0] * 4 + [1] * 5
    assert names(backlog) == ["5", "6", "7", "8"]


def test_backlog_frees_the_bytes_of_taken_records():
    backlog = Backlog(99, 2 * SIZE)
    for trace in TRACES:
        assert backlog.put(trace) == 0
        assert backlog.take(0.0) is trace
    assert backlog.take(0.0) is None


def test_backlog_keeps_the_newest_record_above_its_limit():
    backlog = Backlog(99, 1)
    assert [backlog.put(trace) for trace in TRACES[:3]] == [0, 1, 1]
    assert names(backlog) == ["2"]


def test_closed_backlog_refuses_records_and_returns_the_rest():
    backlog = Backlog(9, 9 * SIZE)
    backlog.put(TRACES[0])
    backlog.close()
    with pytest.raises(ClosedError):
        backlog.put(TRACES[1])
    assert not backlog.finished
    assert backlog.clear() == 1
    assert backlog.finished
