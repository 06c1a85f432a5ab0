"""What a budget keeps of traffic: so many bytes a second, everything where that is enough, and each by its chance."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from osd.capture.backlog import Backlog, ClosedError
from osd.capture.budget import SECONDS, Budget
from osd.capture.trace import Array
from tests.clocks import Clock
from tests.traces import small_trace


@dataclass(frozen=True)
class Sized:
    """A record of a size and a score."""

    nbytes: int
    score: float = 1.0
    domain: str = "general"
    created: float = 0.0


def kept(budget, clock, records, rate, name=""):
    """Offers records, so many a second; the weights, None for those that were not kept."""
    weights = []
    for number, record in enumerate(records):
        clock.now += 1 / rate
        weights.append(budget.weight(record, f"{name}{number}", record.nbytes))
    return weights


def test_where_there_is_room_for_all_every_record_is_kept_and_counts_once():
    clock = Clock()
    budget = Budget(100_000, lambda record: record.score, clock)
    records = [Sized(1000, score) for score in (0.2, 1.0, 0.5) * 500]
    assert kept(budget, clock, records, rate=90) == [1.0] * 1500


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_over_minutes_it_takes_the_bytes_that_it_may_and_no_more(share):
    clock, chance = Clock(), np.random.default_rng(0)
    records = [Sized(int(size), float(score)) for size, score in chance.uniform((500, 0.2), (5000, 1), (8000, 2))]
    offered = sum(record.nbytes for record in records)
    budget = Budget(share * offered / 80, lambda record: record.score, clock)
    weights = kept(budget, clock, records, rate=100)
    taken = sum(record.nbytes for record, weight in zip(records, weights, strict=True) if weight is not None)
    assert 0.9 * share * offered < taken < share * offered + budget.rate * SECONDS


def test_a_burst_of_ten_times_the_traffic_takes_little_more_than_what_was_saved_up():
    clock = Clock()
    budget = Budget(20_000, lambda record: record.score, clock)
    kept(budget, clock, [Sized(1000)] * 2000, rate=100, name="calm")
    burst = kept(budget, clock, [Sized(1000)] * 10_000, rate=1000, name="burst")
    taken = 1000 * sum(weight is not None for weight in burst)
    assert 0.9 * 10 < taken / 20_000 < 10 + 2 * SECONDS


def test_what_is_worth_more_is_kept_more_often_and_weighs_less():
    clock = Clock()
    budget = Budget(10_000, lambda record: record.score, clock)
    records = [Sized(1000, score) for score in (0.2, 0.8) * 4000]
    weights = kept(budget, clock, records, rate=100)
    low, high = ([weight for weight in weights[place::2] if weight is not None] for place in (0, 1))
    assert len(high) == pytest.approx(4 * len(low), rel=0.15)
    assert np.mean(low) == pytest.approx(4 * np.mean(high), rel=0.15)


def test_the_weights_of_what_is_kept_add_up_to_what_was_offered_however_the_load_changes():
    clock, off = Clock(), []
    for seed in range(20):
        chance = np.random.default_rng(seed)
        budget = Budget(5000, lambda record: record.score, clock)
        total = said = variance = 0.0
        for phase in range(6):
            records = [
                Sized(int(size), float(score)) for size, score in chance.uniform((200, 0.2), (3000, 1), (800, 2))
            ]
            weights = kept(budget, clock, records, rate=float(chance.choice([5, 20, 200])), name=f"{seed} {phase} ")
            total += sum(record.nbytes for record in records)
            for record, weight in zip(records, weights, strict=True):
                if weight is not None:
                    said += weight * record.nbytes
                    variance += weight * (weight - 1) * record.nbytes**2
        off.append((said - total) / variance**0.5)
    print("mean and spread of (said - true) / standard error:", np.mean(off), np.std(off))
    assert abs(np.mean(off)) < 4 / len(off) ** 0.5
    assert 0.6 < np.std(off) < 1.5


def test_demand_is_that_of_the_last_seconds_by_score():
    clock = Clock()
    budget = Budget(1000, lambda record: record.score, clock)
    budget.weight(Sized(1000), "first", 1000)
    assert budget.demand == pytest.approx(1051, rel=0.01), "the first record stands for a second"
    kept(budget, clock, [Sized(1000, 0.5)] * 20_000, rate=100)
    assert budget.demand == pytest.approx(50_000, rel=0.01)
    clock.now += 20 * SECONDS
    assert budget.demand < 1


def test_record_that_is_kept_weighs_ten_thousand_at_most():
    clock = Clock()
    weights = kept(Budget(1e-6, lambda record: record.score, clock), clock, [Sized(10**6)] * 50_000, rate=100)
    assert max(weight for weight in weights if weight is not None) == pytest.approx(10_000)


def test_the_same_record_is_drawn_alike_whoever_draws():
    one, other = (Budget(1000, lambda record: record.score, Clock()) for _ in range(2))
    first = [one.weight(Sized(1000), f"r{n}", 1000) for n in range(200)]
    assert first == [other.weight(Sized(1000), f"r{n}", 1000) for n in range(200)]
    assert 0 < sum(weight is not None for weight in first) < 200


TRACES = [small_trace(request_id=str(number)) for number in range(9)]
SIZE = TRACES[0].nbytes


def names(backlog):
    backlog.close()
    taken = []
    while not backlog.finished:
        taken.append(backlog.take(0.0).request_id)
    return taken


def test_a_record_is_as_large_as_its_arrays():
    larger = msgspec.structs.replace(TRACES[0], prompt_ids=Array.of(np.zeros(1004, np.int32)))
    assert larger.nbytes == SIZE + 4000


@pytest.mark.parametrize(("records", "most_bytes"), [(4, 99 * SIZE), (99, 4 * SIZE), (99, 5 * SIZE - 1)])
def test_the_oldest_make_room_for_the_newest(records, most_bytes):
    backlog = Backlog(records, most_bytes)
    assert [backlog.put(trace) for trace in TRACES] == [0] * 4 + [1] * 5
    assert names(backlog) == ["5", "6", "7", "8"]


def test_what_left_leaves_its_bytes_to_others():
    backlog = Backlog(99, 2 * SIZE)
    for trace in TRACES:
        assert backlog.put(trace) == 0
        assert backlog.take(0.0) is trace
    assert backlog.take(0.0) is None


def test_a_record_that_is_too_large_alone_is_kept_alone():
    backlog = Backlog(99, 1)
    assert [backlog.put(trace) for trace in TRACES[:3]] == [0, 1, 1]
    assert names(backlog) == ["2"]


def test_what_is_closed_takes_nothing_and_gives_what_it_has():
    backlog = Backlog(9, 9 * SIZE)
    backlog.put(TRACES[0])
    backlog.close()
    with pytest.raises(ClosedError):
        backlog.put(TRACES[1])
    assert not backlog.finished
    assert backlog.clear() == 1
    assert backlog.finished
