"""What ``/metrics`` of a service says at a moment, and what happened between two of these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """The samples of an exposition: ``values`` by name and labels, and the time ``at`` in seconds."""

    at: float = 0.0
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, at: float = 0.0) -> Scrape:
        """Parse Prometheus' text format.

        Raises:
            ValueError: it is something else.
        """
        values: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name][frozenset(sample.labels.items())] = sample.value
        return cls(at, dict(values))

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples of a name that have these labels."""
        wanted = labels.items()
        return math.fsum(value for has, value in self.values.get(name, {}).items() if wanted <= has)

    def by(
        self, name: str, *labels: str, of: Callable[[list[float]], float] = math.fsum
    ) -> dict[tuple[str, ...], float]:
        """A name's samples by some of their labels, in the order of these; several are summed, or what ``of`` makes."""
        found: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        for has, value in self.values.get(name, {}).items():
            known = dict(has)
            found[tuple(known.get(label, "") for label in labels)].append(value)
        return {key: of(values) for key, values in sorted(found.items())}


@dataclass(frozen=True)
class Span:
    """What happened from one scrape to a later one."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """Between the two, never 0."""
        return max(self.now.at - self.before.at, 1e-9)

    def added(self, name: str, **labels: str) -> float:
        """By how much a counter grew; one that fell began anew in between."""
        value, earlier = self.now.sum(name, **labels), self.before.sum(name, **labels)
        return value - earlier if value >= earlier else value

    def added_by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The same by some of its labels."""
        now, before = self.now.by(name, *labels), self.before.by(name, *labels)
        earlier = {key: before.get(key, 0.0) for key in now}
        return {key: value - earlier[key] if value >= earlier[key] else value for key, value in now.items()}

    def rate(self, name: str, **labels: str) -> float:
        """Of a counter a second."""
        return self.added(name, **labels) / self.seconds

    def percentiles(self, name: str, shares: Iterable[float]) -> list[float | None]:
        """Of what a histogram saw in between, linear within a bucket; None where it saw nothing.

        What lies in the last bucket is told by where that begins.
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
