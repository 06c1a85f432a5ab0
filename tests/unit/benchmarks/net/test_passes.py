from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.net.passes import FROZEN, TRAINED, ServicePass, TrafficPoint, summarize_pass
from benchmarks.net.tables import accounts
from osd.config import Settings
from osd.simulation.bill import payback
from tests.unit.benchmarks.net.made_up_passes import CLIENTS, made_up_sampler, sample, service_pass


def test_pass_counts_from_its_first_sample():
    result = service_pass()
    assert result.curve[0] == TrafficPoint(0, 0, 0, 0, 0, 0, 0)
    assert result.end == TrafficPoint(
        seconds=100, requests=40, tokens=400, drafted=200, accepted=100, busy=50, training=20
    )
    assert (result.cpu_seconds, result.swaps) == (100, 2)
    assert result.busy == 0.5
    assert result.speed == 8.0
    assert result.charged_speed == pytest.approx(400 / (50 + 20 / 2))  # two cores compute for the trainer
    assert result.tokens_per_cpu_second == 4.0
    assert result.acceptance == 0.5
    assert (result.written, result.prompt_tokens, result.cached_tokens) == (40_000, 2400, 800)
    assert json.loads(json.dumps(result.figures()))["charged_speed"] == result.charged_speed


def test_pass_names_the_versions_of_its_domain():
    samples = [sample(float(n), version=version) for n, version in enumerate([1, 1, 2, 2, 3, 3])]
    assert summarize_pass(TRAINED, CLIENTS, made_up_sampler(*samples), Settings(), {}).versions == [1, 2, 3]


def test_curve_has_totals_at_each_part_of_the_requests():
    samples = [sample(n, requests=n, tokens=10 * n, busy=n, drafted=10 * n) for n in range(41)]
    points = summarize_pass(FROZEN, CLIENTS, made_up_sampler(*samples), Settings(), {}).curve
    assert [point.requests for point in points] == list(range(0, 41, 2))
    assert [point.tokens for point in points] == list(range(0, 401, 20))
    assert [point.seconds for point in points] == [point.busy for point in points]


def test_curve_of_sparse_samples_has_fewer_points():
    samples = [sample(0.0), sample(1.0, 10, 100, 10, 10, 1), sample(2.0, 40, 400, 40, 40, 4)]
    assert [
        point.requests for point in summarize_pass(FROZEN, CLIENTS, made_up_sampler(*samples), Settings(), {}).curve
    ] == [0, 10, 40]


def of_points(curve) -> ServicePass:
    """Return a pass with points of (requests, busy seconds, training seconds), at intervals of ten seconds."""
    return replace(
        service_pass(), curve=[TrafficPoint(10.0 * n, r, 10 * r, 0, 0, b, t) for n, (r, b, t) in enumerate(curve)]
    )


def test_accounts_compare_training_cost_with_saved_time():
    trained = of_points([(0, 0, 0), (10, 12, 6), (20, 20, 6), (30, 26, 6)])
    without = of_points([(0, 0, 0), (20, 20, 0), (40, 40, 0)])
    account = accounts(trained, without)
    assert [(point.cost, point.saved) for point in account] == [(0, 0), (6, -4), (6, 0), (6, 8)]  # on two cores
    assert [point.seconds for point in account] == [0, 10, 20, 30]
    assert payback(account) == 30
    assert payback(account[:-1]) is None
    assert payback([*account, replace(account[-1], seconds=40.0, cost=9.0)]) is None
