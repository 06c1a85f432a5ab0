from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.learning.drift import Cusum, DriftWatch
from tests.unit.learning.toys import make_trace

RECORDS = 500


def stream(rng, rate, count, tokens=30, spread=0.0):
    """Return (accepted, tested) of ``count`` requests, whose rates have a standard deviation of ``spread``."""
    if spread:
        size = rate * (1 - rate) / spread**2 - 1
        rates = rng.beta(rate * size, (1 - rate) * size, count)
    else:
        rates = np.full(count, rate)
    return [(int(a), tokens) for a in rng.binomial(tokens, rates)]


def run_length(records, test=None):
    """Return the number of records until the alarm, or of all records without an alarm."""
    test = test or Cusum(0.1, RECORDS)
    for n, (accepted, tested) in enumerate(records, 1):
        if test.add(accepted, tested) is not None:
            return n
    return len(records)


@pytest.mark.parametrize(("rate", "spread"), [(0.3, 0.0), (0.6, 0.0), (0.6, 0.1), (0.8, 0.12)])
def test_false_alarms_are_rarer_than_configured(rate, spread):
    # The streams end before most alarms, so the rate of alarms is measured and not the mean run length.
    rng = np.random.default_rng(0)
    lengths = [run_length(stream(rng, rate, 1000, spread=spread)) for _ in range(60)]
    alarms = sum(length < 1000 for length in lengths)
    between = sum(lengths) / max(alarms, 1)
    print(f"rate {rate}, spread {spread}: {alarms} false alarms, one in {between:.0f} records")
    assert between > RECORDS


@pytest.mark.parametrize(("spread", "limit"), [(0.0, 12), (0.1, 40)])
def test_fall_is_detected_within_tens_of_records(spread, limit):
    rng = np.random.default_rng(1)
    delays = [
        run_length(stream(rng, 0.6, 60, spread=spread) + stream(rng, 0.42, 400, spread=spread)) - 60 for _ in range(100)
    ]
    print(f"spread {spread}: delay {np.median(delays)} records, at most {max(delays)}")
    assert 0 < np.median(delays) <= limit
    assert max(delays) < 400


def test_differing_requests_raise_few_alarms():
    # Without the dispersion a single poor request would count as many independent tokens.
    rng = np.random.default_rng(2)
    careful = [run_length(stream(rng, 0.6, 500, spread=0.2)) for _ in range(30)]
    assert sum(length < 500 for length in careful) <= 8


@pytest.mark.parametrize(("first", "then"), [(0.5, 0.8), (0.0, 0.0), (1.0, 1.0)])
def test_rise_and_extreme_rates_raise_no_alarm(first, then):
    rng = np.random.default_rng(3)
    assert run_length(stream(rng, first, 60) + stream(rng, then, 500)) == 560
    assert run_length(stream(rng, 1.0, 60) + stream(rng, 0.5, 100)) < 70


def trace(rng, domain, version, rate):
    verdict = np.where(rng.random(30) < rate, ACCEPTED, REJECTED)
    verdict[::5] = NOT_DRAFTED
    base = make_trace(completion=30, domain=domain)
    return msgspec.structs.replace(base, drafter_version=version, verdict=Array.of(verdict.astype(np.int8)))


def test_each_domain_and_version_has_its_own_level():
    rng = np.random.default_rng(5)
    watch = DriftWatch(0.1, 10_000)
    for _ in range(80):
        assert watch.add(trace(rng, "code", 1, 0.8)) is None
        assert watch.add(trace(rng, "chat", 1, 0.3)) is None
        # A worse version is not drift: each version has its own level.
        assert watch.add(trace(rng, "code", 2, 0.5)) is None
    alarms = []
    while not alarms:
        assert watch.add(trace(rng, "chat", 1, 0.3)) is None
        alarms += filter(None, [watch.add(trace(rng, "code", 1, 0.5))])
    assert (alarms[0].domain, alarms[0].version) == ("code", 1)
    assert alarms[0].before == pytest.approx(0.8, abs=0.05)
    assert alarms[0].now == pytest.approx(0.5, abs=0.12)


def test_fall_is_reported_once():
    rng = np.random.default_rng(6)
    watch = DriftWatch(0.1, 10_000)
    rates = [0.8] * 80 + [0.5] * 300
    alarms = [n for n, rate in enumerate(rates) if watch.add(trace(rng, "general", 1, rate))]
    assert len(alarms) == 1


def test_alarm_has_the_start_of_the_fall():
    rng = np.random.default_rng(7)
    watch = DriftWatch(0.1, 1000)
    for made in range(200):
        rate = 0.8 if made < 120 else 0.65
        alarm = watch.add(msgspec.structs.replace(trace(rng, "general", 1, rate), created=float(made)))
        if alarm is not None:
            break
    assert 115 <= alarm.since < made - 5
