"""Histogram buckets, compared with those of the Prometheus client."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from osd.histogram import ACCEPTED, FIRST_SECONDS, LONG_SECONDS, SHORT_SECONDS, TOKENS, Histogram


@pytest.mark.parametrize("bounds", [SHORT_SECONDS, FIRST_SECONDS, LONG_SECONDS, TOKENS, ACCEPTED])
def test_histogram_has_the_bucket_counts_of_prometheus(bounds):
    chance = random.Random(1)  # noqa: S311
    figures = [*bounds, 0.0, 1e9, *(chance.expovariate(1 / bounds[len(bounds) // 2]) for _ in range(500))]
    histogram, registry = Histogram(bounds), CollectorRegistry()
    reference = Reference("figures", "", buckets=bounds, registry=registry)
    for figure in figures:
        histogram.observe(figure)
        reference.observe(figure)
    (family,) = registry.collect()
    below = [sample.value for sample in family.samples if sample.name == "figures_bucket"]
    assert [sum(histogram.counts[: place + 1]) for place in range(len(bounds) + 1)] == below
    assert histogram.sum == pytest.approx(registry.get_sample_value("figures_sum"))


def test_histogram_copy_is_independent():
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.5)
    copy = histogram.copy()
    histogram.observe(1.5)
    assert (copy.counts, copy.sum) == ([0, 1, 0], 1.5)
