"""Exposition of all metrics at ``/metrics``, in the text format of Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from osd.metrics import Labels, Metric, Name
from serving.metrics.report import Report, ServiceTotals
from serving.metrics.table import PROXY, REPLICA, REPORTED, SERVICE, ServiceState

__all__ = ["CONTENT_TYPE", "render"]

_SERIES_PER_REPLICA = 100  # largest number of replicas with a series each; more would make the page megabytes long

_Values = Mapping[str, Mapping[Labels, float]]
"""Values by key and labels."""


def render(totals: ServiceTotals, domain: str, model: str, engine: Sequence[Family] = ()) -> bytes:
    """Return the exposition of a service.

    Args:
        totals: totals of the service.
        domain: domain of the service.
        model: name of its model.
        engine: metrics of another engine than ours; they replace ours with the same name.
    """
    return generate_latest(_Families(totals, domain, model, engine))


class _Families(Collector):
    def __init__(self, totals: ServiceTotals, domain: str, model: str, engine: Sequence[Family]) -> None:
        self._totals, self._domain, self._model, self._engine = totals, domain, model, engine

    def collect(self) -> Iterator[Family]:
        replaced = {family.name for family in self._engine}
        yield from self._engine
        yield from (family for family in self._collect() if family.name not in replaced)

    def _collect(self) -> Iterator[Family]:
        service = ServiceState(self._totals, self._domain)
        service_values = (row.values(service) for row in SERVICE)
        values = _grouped(chain(self._totals.counters.items(), *service_values))
        gauges = [(report.replica, _grouped(_gauges(report))) for report in self._totals.replicas]
        for row in (*REPLICA, *REPORTED):
            if row.kind == "histogram":
                yield self._histogram(row, values)
            else:
                yield self._family(row, _merged(row, gauges) if row.kind == "gauge" else values.get(row.key, {}))
        for row in (*PROXY, *SERVICE):
            yield self._family(row, values.get(row.key, {}))

    def _family(self, row: Metric[Any], values: Mapping[Labels, float]) -> Family:
        kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        family = kind(row.name, row.help, labels=row.labels)
        for labels, value in self._published(row, values).items():
            family.add_metric(labels, value)
        return family

    def _histogram(self, row: Metric[Any], values: _Values) -> Family:
        family = HistogramMetricFamily(row.name, row.help, labels=row.labels)
        buckets, sums = (values.get(key, {}) for key in row.keys)
        counts: defaultdict[Labels, list[float]] = defaultdict(lambda: [0.0] * (len(row.bounds) + 1))
        for (*labels, place), n in buckets.items():
            counts[tuple(labels)][int(place)] += n
        names = [*map(floatToGoString, row.bounds), "+Inf"]
        published = self._published(row, sums)
        for labels in dict.fromkeys((*row.zeros, *counts)) if row.by else ((),):
            below = list(zip(names, accumulate(counts[labels]), strict=True))
            series = self._labels(row, labels)
            family.add_metric(series, below, published.get(series, 0))
        return family

    def _published(self, row: Metric[Any], values: Mapping[Labels, float]) -> dict[tuple[str, ...], float]:
        """Return the values by the labels of the published series."""
        zeros = row.zeros if row.by else ((),)
        published = dict.fromkeys((self._labels(row, labels) for labels in zeros), 0.0)
        for labels, value in sorted(values.items(), key=_label_order):
            series = self._labels(row, labels)
            published[series] = published.get(series, 0) + value
        return published

    def _labels(self, row: Metric[Any], labels: Labels) -> tuple[str, ...]:
        texts = tuple(map(str, labels[: len(row.by)]))
        if len(texts) == len(row.labels):
            return texts
        return (self._model if row.labels[0] == "model_name" else self._domain, *texts)


def _label_order(item: tuple[Labels, float]) -> list[tuple[bool, str | int]]:
    return [(isinstance(label, int), label) for label in item[0]]


def _gauges(report: Report) -> Iterator[tuple[Name, float]]:
    return chain(report.gauges.items(), *(row.values(report) for row in REPORTED))


def _merged(row: Metric[Any], gauges: list[tuple[str, _Values]]) -> dict[Labels, float]:
    """Return the values of a gauge over all replicas."""
    if row.merge == "each" and len(gauges) > _SERIES_PER_REPLICA:
        return {}
    merged: defaultdict[Labels, float] = defaultdict(float)
    for replica, values in gauges:
        for labels, value in values.get(row.key, {}).items():
            merged[(*labels, replica) if row.merge == "each" else labels] += value
    return {labels: value / len(gauges) for labels, value in merged.items()} if row.merge == "mean" else merged


def _grouped(values: Iterable[tuple[Name, float]]) -> _Values:
    groups: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
    for name, value in values:
        key, *labels = (name,) if isinstance(name, str) else name
        groups[str(key)][tuple(labels)] = value
    return groups
