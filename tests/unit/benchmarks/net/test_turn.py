from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.net.tables import accounts
from benchmarks.net.turn import FROZEN, TRAINED, Point, Turn, turn_of
from osd.config import Settings
from osd.simulation.bill import payback
from tests.unit.benchmarks.net.turns import CLIENTS, look, looked, turn


def test_a_turn_is_what_was_counted_since_its_first_look():
    found = turn()
    assert found.curve[0] == Point(0, 0, 0, 0, 0, 0, 0)
    assert found.end == Point(seconds=100, requests=40, tokens=400, drafted=200, accepted=100, busy=50, training=20)
    assert (found.cpu_seconds, found.swaps) == (100, 2)
    assert found.busy == 0.5
    assert found.speed == 8.0
    assert found.charged_speed == pytest.approx(400 / (50 + 20 / 2))  # two cores compute for the trainer
    assert found.tokens_per_cpu_second == 4.0
    assert found.acceptance == 0.5
    assert (found.written, found.prompt_tokens, found.cached_tokens) == (40_000, 2400, 800)
    assert json.loads(json.dumps(found.figures()))["charged_speed"] == found.charged_speed


def test_turn_names_the_versions_of_its_own_domain():
    samples = [look(float(n), version=version) for n, version in enumerate([1, 1, 2, 2, 3, 3])]
    assert turn_of(TRAINED, CLIENTS, looked(*samples), Settings(), {}).versions == [1, 2, 3]


def test_a_curve_has_what_was_done_until_each_part_of_the_requests():
    samples = [look(n, requests=n, tokens=10 * n, busy=n, drafted=10 * n) for n in range(41)]
    points = turn_of(FROZEN, CLIENTS, looked(*samples), Settings(), {}).curve
    assert [point.requests for point in points] == list(range(0, 41, 2))
    assert [point.tokens for point in points] == list(range(0, 401, 20))
    assert [point.seconds for point in points] == [point.busy for point in points]


def test_looks_that_are_far_apart_make_a_curve_of_fewer_points():
    samples = [look(0.0), look(1.0, 10, 100, 10, 10, 1), look(2.0, 40, 400, 40, 40, 4)]
    assert [point.requests for point in turn_of(FROZEN, CLIENTS, looked(*samples), Settings(), {}).curve] == [0, 10, 40]


def of_points(curve) -> Turn:
    """A pass with points of (requests, busy seconds, training seconds), ten seconds apart."""
    return replace(turn(), curve=[Point(10.0 * n, r, 10 * r, 0, 0, b, t) for n, (r, b, t) in enumerate(curve)])


def test_an_account_sets_what_training_cost_against_the_seconds_that_the_engine_was_spared():
    trained = of_points([(0, 0, 0), (10, 12, 6), (20, 20, 6), (30, 26, 6)])
    without = of_points([(0, 0, 0), (20, 20, 0), (40, 40, 0)])
    found = accounts(trained, without)
    assert [(one.cost, one.saved) for one in found] == [(0, 0), (6, -4), (6, 0), (6, 8)]  # on two cores
    assert [one.seconds for one in found] == [0, 10, 20, 30]
    assert payback(found) == 30
    assert payback(found[:-1]) is None
    assert payback([*found, replace(found[-1], seconds=40.0, cost=9.0)]) is None
