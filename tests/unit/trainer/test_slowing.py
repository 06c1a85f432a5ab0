"""What training takes from the rounds beside it, on replicas that are slowed by a known share."""

from __future__ import annotations

import random

import pytest

from osd.registry.replica_loads import ReplicaLoad
from trainer.investor import Slowing


def run(slope, *, usual=1.3, noise=0.05, busy=0.6, seconds=120.0, trains=0.3):
    """Looks every quarter of a second at replicas whose forwards take ``slope`` longer beside a core that trains."""
    chance = random.Random(0)  # noqa: S311 - repeatable, not secret
    it, now, forwards, rest, trained, lost = Slowing(), 0.0, 0.0, 0.0, 0.0, 0.0
    while now < seconds:
        lost += it.observe([ReplicaLoad(1, 0, 1, 1.0, 1.0, forwards, rest)], trained, now)
        computes = chance.random() < trains
        done = 0.25 * busy / usual
        forwards += done * (usual + slope * computes) * (1 + chance.gauss(0, noise))
        now, rest, trained = now + 0.25, rest + done, trained + 0.25 * computes
    return it, lost, rest * trains


@pytest.mark.parametrize("slope", [0.0, 0.3, 0.8])
def test_the_slope_is_what_training_adds_and_not_what_is_always_there(slope):
    it, lost, beside = run(slope)
    assert it.slope == pytest.approx(slope, abs=0.06)
    assert lost == pytest.approx(slope * beside, abs=1.5)


def test_each_second_of_training_takes_less_where_rounds_run_less_of_the_time():
    much, little = (run(0.5, busy=busy, noise=0.01, seconds=400)[0].per_second for busy in (0.8, 0.2))
    assert much == pytest.approx(0.5 * 0.8 / 1.3, rel=0.15)
    assert little == pytest.approx(0.5 * 0.2 / 1.3, rel=0.3)


def test_nothing_is_lost_where_nothing_runs_or_a_replica_starts_anew():
    it = Slowing()
    load = ReplicaLoad(1, 0, 1, 1.0, 1.0, 5.0, 4.0)
    assert it.observe([load], 0.0, 0.0) == 0
    assert it.observe([load], 1.0, 1.0) == 0
    assert it.observe([ReplicaLoad(1, 0, 1, 1.0, 1.0, 0.5, 0.4)], 2.0, 2.0) == 0
    assert (it.slope, it.per_second) == (0, 0)
