"""Definition of metrics, and the counts of speculative decoding.

A *round* is the drafting and verification of one sequence in one decoding step; vLLM calls it a draft. The target
accepts a path of draft tokens and adds a bonus token. The module imports no heavy packages. The measurements of the
gate, which need tensors, are in ``osd.learning.evaluation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from osd.histogram import Histogram

Labels = tuple[str | int, ...]

Name = str | tuple[str | int, ...]
"""Name of a value in reports and in the history: the key of its metric, or the key and labels."""

Reading = float | Histogram | Mapping[Labels, float] | Mapping[Labels, Histogram] | None

Source = TypeVar("Source", contravariant=True)


@dataclass(frozen=True)
class Listed:
    """Entry of a metric in the list ``place`` of the dashboard; with ``alarm`` a value above 0 is highlighted."""

    place: Literal["requests", "planner", "stream"]
    title: str
    alarm: bool = False


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """Definition of one metric, for reports, their merge, the history, ``/metrics`` and the dashboard.

    Attributes:
        name: the published name, without the ending ``_total`` of counters.
        key: the name in reports, in the history and in the dashboard's data. Metrics with the same key publish the same
            values. Keys that begin with ``version_`` have the labels domain and version, and old versions are merged.
        help: the sentence for ``/metrics`` and the documentation.
        by: labels of each value.
        read: returns the value from its source, or values by labels; by default the attribute named ``key``. Values
            without a domain get the domain of the service. Further labels are summed over.
        kind: the type of the metric. Counters and histograms only grow, and their increments are summed over replicas.
        merge: how the gauges of several replicas become one value; ``each`` publishes one series per replica.
        bounds: upper bounds of the buckets of a histogram.
        has_service_label: whether series carry the service's model or domain in front of ``by``.
        zeros: labels that are published as 0 before the first value; a metric without ``by`` is always published.
        history: whether the dashboard keeps the last hour.
        unit: the unit on the dashboard.
        listed: the entry in a list of the dashboard, if any.
    """

    name: str
    key: str
    help: str
    by: tuple[str, ...] = ()
    read: Callable[[Source], Reading] | None = None
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    merge: Literal["sum", "mean", "each"] = "sum"
    bounds: tuple[float, ...] = ()
    has_service_label: bool = True
    zeros: tuple[Labels, ...] = ()
    history: bool = False
    unit: Literal["", "seconds", "bytes"] = ""
    listed: Listed | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the published series."""
        if self.name.startswith("vllm:"):
            return ("model_name", *self.by)
        return ("domain", *self.by) if self.has_service_label and "domain" not in self.by else self.by

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the values in reports; a histogram has one key for its buckets and one for its sum."""
        return (f"{self.key}_bucket", f"{self.key}_sum") if self.kind == "histogram" else (self.key,)

    def values(self, source: Source) -> Iterator[tuple[Name, float]]:
        """Yield the name and value of each value in ``source``; empty buckets are left out."""
        reading: Any = (self.read or attrgetter(self.key))(source)
        if reading is None:
            return
        for labels, value in reading.items() if isinstance(reading, Mapping) else [((), reading)]:
            if isinstance(value, Histogram):
                bucket, total = self.keys
                yield named(total, labels), value.sum
                yield from ((named(bucket, (*labels, place)), n) for place, n in enumerate(value.counts) if n)
            else:
                yield named(self.key, labels), value


def named(key: str, labels: Labels) -> Name:
    """Return the key alone without labels, else the flat tuple ``(key, *labels)``."""
    return (key, *labels) if labels else key


def acceptance_rate(accepted: float, drafted: float) -> float:
    """Return the ratio of accepted to drafted tokens, 0 when no tokens were drafted."""
    return accepted / drafted if drafted else 0.0


def mean_acceptance_length(accepted: float, rounds: float) -> float:
    """Return the mean number of tokens per round, the bonus token included; 1 without rounds."""
    return 1.0 + accepted / rounds if rounds else 1.0


@dataclass
class SourceCounts:
    """Numbers of drafted and accepted tokens of one source."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class SpeculationCounts:
    """Counts of drafting and acceptance, for one or more requests.

    Attributes:
        rounds: the number of rounds that drafted.
        drafted: the number of draft tokens.
        accepted: the number of accepted draft tokens.
        accepted_per_position: the number of accepted draft tokens at each depth.
        histogram: the number of rounds by their number of accepted tokens.
        by_source: ``drafted`` and ``accepted`` by the source of the tokens.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    @classmethod
    def sum(cls, counts: Iterable[SpeculationCounts]) -> SpeculationCounts:
        """Return a new sum of ``counts``, which stay unchanged; zeros without any."""
        total = cls()
        for part in counts:
            total.add(part)
        return total

    def count(self, drafted: Mapping[str, int], accepted: Sequence[str]) -> None:
        """Count one round.

        Args:
            drafted: the number of nodes of the draft by source, at least 1 in total.
            accepted: the source of each accepted node, in order of depth.
        """
        count = len(accepted)
        self.rounds += 1
        self.accepted += count
        if count > len(self.accepted_per_position):
            self.accepted_per_position += [0] * (count - len(self.accepted_per_position))
        for depth in range(count):
            self.accepted_per_position[depth] += 1
        if count >= len(self.histogram):
            self.histogram += [0] * (count + 1 - len(self.histogram))
        self.histogram[count] += 1
        for source, nodes in drafted.items():
            self.drafted += nodes
            self._source(source).drafted += nodes
        for source in set(accepted):
            self._source(source).accepted += accepted.count(source)

    def add(self, other: SpeculationCounts) -> None:
        """Add all counts of ``other``, also by depth and by source."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        _add(self.accepted_per_position, other.accepted_per_position)
        _add(self.histogram, other.histogram)
        for source, counts in other.by_source.items():
            self._source(source).drafted += counts.drafted
            self._source(source).accepted += counts.accepted

    @property
    def acceptance_rate(self) -> float:
        """Ratio of accepted to drafted tokens, 0 when no tokens were drafted."""
        return acceptance_rate(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens per round, the bonus token included; 1 without rounds."""
        return mean_acceptance_length(self.accepted, self.rounds)

    def _source(self, source: str) -> SourceCounts:
        counts = self.by_source.get(source)
        if counts is None:
            counts = self.by_source[source] = SourceCounts()
        return counts


def _add(values: list[int], increments: Sequence[int]) -> None:
    values.extend([0] * (len(increments) - len(values)))
    for index, value in enumerate(increments):
        values[index] += value


SPECULATION_METRICS: tuple[Metric[SpeculationCounts], ...] = (
    Metric("vllm:spec_decode_num_drafts", "rounds", "Rounds that drafted.", history=True,
           listed=Listed("planner", "Rounds that drafted")),
    Metric("vllm:spec_decode_num_draft_tokens", "drafted", "Draft tokens.", history=True),
    Metric("vllm:spec_decode_num_accepted_tokens", "accepted", "Accepted draft tokens.", history=True),
    Metric("vllm:spec_decode_num_accepted_tokens_per_pos", "accepted_per_position",
           "Accepted draft tokens by their position in the draft.", ("position",),
           lambda counts: {(position,): n for position, n in enumerate(counts.accepted_per_position)}, history=True),
    Metric("osd_source_draft_tokens", "source_drafted", "Draft tokens by their source.", ("source",),
           lambda counts: {(source,): tokens.drafted for source, tokens in counts.by_source.items()}, history=True),
    Metric("osd_source_accepted_tokens", "source_accepted", "Accepted draft tokens by their source.", ("source",),
           lambda counts: {(source,): tokens.accepted for source, tokens in counts.by_source.items()}, history=True),
)  # fmt: skip
"""Metrics of all drafts of a replica."""
