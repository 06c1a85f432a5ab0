from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.learning.drift import Cusum, DriftWatch
from tests.unit.learning.toys import make_trace

RECORDS = 500


def stream(rng, rate, count, tokens=30, spread=0.0):
    """(accepted, tested) of ``count`` requests; their own rates have a standard deviation of ``spread``."""
    if spread:
        size = rate * (1 - rate) / spread**2 - 1
        rates = rng.beta(rate * size, (1 - rate) * size, count)
    else:
        rates = np.full(count, rate)
    return [(int(a), tokens) for a in rng.binomial(tokens, rates)]


def run_length(records, test=None):
    """Records until the alarm, all of them when there is none."""
    test = test or Cusum(0.1, RECORDS)
    for n, (accepted, tested) in enumerate(records, 1):
        if test.add(accepted, tested) is not None:
            return n
    return len(records)


@pytest.mark.parametrize(("rate", "spread"), [(0.3, 0.0), (0.6, 0.0), (0.6, 0.1), (0.8, 0.12)])
def test_false_alarms_are_as_rare_as_promised(rate, spread):
    # Alarms of many streams over their records: the streams are cut, so that the mean length cannot be taken.
    rng = np.random.default_rng(0)
    lengths = [run_length(stream(rng, rate, 1000, spread=spread)) for _ in range(60)]
    alarms = sum(length < 1000 for length in lengths)
    between = sum(lengths) / max(alarms, 1)
    print(f"rate {rate}, spread {spread}: {alarms} false alarms, one in {between:.0f} records")
    assert between > RECORDS


@pytest.mark.parametrize(("spread", "limit"), [(0.0, 12), (0.1, 40)])
def test_a_fall_is_found_within_some_tens_of_records(spread, limit):
    rng = np.random.default_rng(1)
    delays = [
        run_length(stream(rng, 0.6, 60, spread=spread) + stream(rng, 0.42, 400, spread=spread)) - 60 for _ in range(100)
    ]
    print(f"spread {spread}: delay {np.median(delays)} records, at most {max(delays)}")
    assert 0 < np.median(delays) <= limit
    assert max(delays) < 400


def test_requests_that_differ_from_each_other_are_no_drift():
    # The same test without its dispersion would take one poor request for evidence of many independent tokens.
    rng = np.random.default_rng(2)
    careful = [run_length(stream(rng, 0.6, 500, spread=0.2)) for _ in range(30)]
    assert sum(length < 500 for length in careful) <= 8


@pytest.mark.parametrize(("first", "then"), [(0.5, 0.8), (0.0, 0.0), (1.0, 1.0)])
def test_a_rise_and_rates_at_the_ends_are_no_alarm(first, then):
    rng = np.random.default_rng(3)
    assert run_length(stream(rng, first, 60) + stream(rng, then, 500)) == 560
    assert run_length(stream(rng, 1.0, 60) + stream(rng, 0.5, 100)) < 70


def trace(rng, domain, version, rate):
    verdict = np.where(rng.random(30) < rate, ACCEPTED, REJECTED)
    verdict[::5] = NOT_DRAFTED
    base = make_trace(completion=30, domain=domain)
    return msgspec.structs.replace(base, drafter_version=version, verdict=Array.of(verdict.astype(np.int8)))


def test_domains_and_versions_have_levels_of_their_own():
    rng = np.random.default_rng(5)
    watch = DriftWatch(0.1, 10_000)
    for _ in range(80):
        assert watch.add(trace(rng, "code", 1, 0.8)) is None
        assert watch.add(trace(rng, "chat", 1, 0.3)) is None
        # A worse version is not a drift of traffic: it is compared with itself.
        assert watch.add(trace(rng, "code", 2, 0.5)) is None
    alarms = []
    while not alarms:
        assert watch.add(trace(rng, "chat", 1, 0.3)) is None
        alarms += filter(None, [watch.add(trace(rng, "code", 1, 0.5))])
    assert (alarms[0].domain, alarms[0].version) == ("code", 1)
    assert alarms[0].before == pytest.approx(0.8, abs=0.05)
    assert alarms[0].now == pytest.approx(0.5, abs=0.12)


def test_a_fall_is_told_once():
    rng = np.random.default_rng(6)
    watch = DriftWatch(0.1, 10_000)
    rates = [0.8] * 80 + [0.5] * 300
    alarms = [n for n, rate in enumerate(rates) if watch.add(trace(rng, "general", 1, rate))]
    assert len(alarms) == 1


def test_an_alarm_says_when_the_fall_began():
    rng = np.random.default_rng(7)
    watch = DriftWatch(0.1, 1000)
    for made in range(200):
        rate = 0.8 if made < 120 else 0.65
        alarm = watch.add(msgspec.structs.replace(trace(rng, "general", 1, rate), created=float(made)))
        if alarm is not None:
            break
    assert 115 <= alarm.since < made - 5
