"""Scrapes of a service's ``/metrics``, and the differences between two scrapes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """Samples of one scrape.

    Attributes:
        at: the time of the scrape in seconds.
        values: the samples by name and labels.
    """

    at: float = 0.0
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, at: float = 0.0) -> Scrape:
        """Parse the text format of Prometheus.

        Raises:
            ValueError: the text has another format.
        """
        return cls.of_families(text_string_to_metric_families(text), at)

    @classmethod
    def of_families(cls, families: Iterable[Metric], at: float = 0.0) -> Scrape:
        """Return the samples of metric families, such as those of a registry of this process."""
        values: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        for family in families:
            for sample in family.samples:
                values[sample.name][frozenset(sample.labels.items())] = sample.value
        return cls(at, dict(values))

    def with_labels(self, **labels: str) -> Scrape:
        """Return the samples with the given labels."""
        wanted = labels.items()
        values = {
            name: {present: value for present, value in samples.items() if wanted <= present}
            for name, samples in self.values.items()
        }
        return Scrape(self.at, values)

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name with the given labels."""
        wanted = labels.items()
        return math.fsum(value for present, value in self.values.get(name, {}).items() if wanted <= present)

    def by(
        self, name: str, *labels: str, of: Callable[[list[float]], float] = math.fsum
    ) -> dict[tuple[str, ...], float]:
        """Return the samples of a name, grouped by some of their labels.

        Args:
            name: the name of the samples.
            labels: the labels to group by.
            of: combines the samples of a group; by default their sum.

        Returns:
            The combined value of each group, by the values of ``labels``, sorted.
        """
        groups: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        for present, value in self.values.get(name, {}).items():
            by_label = dict(present)
            groups[tuple(by_label.get(label, "") for label in labels)].append(value)
        return {key: of(values) for key, values in sorted(groups.items())}


@dataclass(frozen=True)
class Span:
    """Difference between a scrape and a later one."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """Time between the two scrapes in seconds, never 0."""
        return max(self.now.at - self.before.at, 1e-9)

    def with_labels(self, **labels: str) -> Span:
        """Return the difference of the samples with the given labels."""
        return Span(self.before.with_labels(**labels), self.now.with_labels(**labels))

    def added(self, name: str, **labels: str) -> float:
        """Return the growth of a counter; a counter that fell was reset, and its new value counts."""
        value, earlier = self.now.sum(name, **labels), self.before.sum(name, **labels)
        return value - earlier if value >= earlier else value

    def added_by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the growth of a counter, grouped by some of its labels."""
        now, before = self.now.by(name, *labels), self.before.by(name, *labels)
        earlier = {key: before.get(key, 0.0) for key in now}
        return {key: value - earlier[key] if value >= earlier[key] else value for key, value in now.items()}

    def rate(self, name: str, **labels: str) -> float:
        """Return the growth of a counter per second."""
        return self.added(name, **labels) / self.seconds

    def percentiles(self, name: str, shares: Iterable[float]) -> list[float | None]:
        """Return percentiles of the values that a histogram counted between the scrapes.

        Values are interpolated linearly within a bucket. A percentile in the last bucket is the lower bound of it.

        Args:
            name: the name of the histogram.
            shares: the percentiles as shares, 0 to 1.

        Returns:
            The percentiles, or None for each of them without new values.
        """
        counts = {float(bound): count for (bound,), count in self.added_by(f"{name}_bucket", "le").items()}
        bounds = sorted(counts)
        total = counts.get(math.inf, 0.0)
        return [_percentile(bounds, counts, share * total) if total else None for share in shares]


def _percentile(bounds: list[float], counts: dict[float, float], wanted: float) -> float:
    low, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (wanted - below) / max(counts[bound] - below, 1e-9)
        low, below = bound, counts[bound]
    return low
