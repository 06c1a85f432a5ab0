"""Buckets, against those of Prometheus' own client."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from osd.histogram import ACCEPTED, FIRST_SECONDS, LONG_SECONDS, SHORT_SECONDS, TOKENS, Histogram


@pytest.mark.parametrize("bounds", [SHORT_SECONDS, FIRST_SECONDS, LONG_SECONDS, TOKENS, ACCEPTED])
def test_figures_fall_into_the_buckets_that_prometheus_would_choose(bounds):
    chance = random.Random(1)  # noqa: S311
    figures = [*bounds, 0.0, 1e9, *(chance.expovariate(1 / bounds[len(bounds) // 2]) for _ in range(500))]
    mine, registry = Histogram(bounds), CollectorRegistry()
    reference = Reference("figures", "", buckets=bounds, registry=registry)
    for figure in figures:
        mine.observe(figure)
        reference.observe(figure)
    (family,) = registry.collect()
    below = [sample.value for sample in family.samples if sample.name == "figures_bucket"]
    assert [sum(mine.counts[: place + 1]) for place in range(len(bounds) + 1)] == below
    assert mine.sum == pytest.approx(registry.get_sample_value("figures_sum"))


def test_a_copy_grows_no_more():
    mine = Histogram((1.0, 2.0))
    mine.observe(1.5)
    copy = mine.copy()
    mine.observe(1.5)
    assert (copy.counts, copy.sum) == ([0, 1, 0], 1.5)
