"""Rows of the table of metrics, and the counts of speculative decoding.

Terms as in vLLM: a *round* drafts tokens of one sequence; the target accepts a path of them and adds a bonus token.
The module imports nothing heavy. The gate's measurements over tensors are in ``osd.learning.evaluation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from osd.histogram import Histogram

Labels = tuple[str | int, ...]

Name = str | tuple[str | int, ...]
"""What a value is called in reports and in the history: the key of its metric, or the key and labels."""

Reading = float | Histogram | Mapping[Labels, float] | Mapping[Labels, Histogram] | None

Source = TypeVar("Source", contravariant=True)


@dataclass(frozen=True)
class Listed:
    """Entry of a metric in a list of the dashboard: ``place`` names the list; a value with ``alarm`` is marked."""

    place: Literal["requests", "planner", "stream"]
    title: str
    alarm: bool = False


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """One row of the table of metrics. Reports, their merge, the history, ``/metrics`` and the dashboard follow it.

    Attributes:
        name: the published name, without the ending ``_total`` of counters.
        key: the name in reports, in the history and in the dashboard's data. Rows with the same key publish the same
            values. Keys that begin with ``version_`` have the labels domain and version, and old versions are folded.
        help: the sentence that ``/metrics`` and the documentation print.
        by: labels of each value.
        read: returns the value from its source, or values by labels; by default the attribute named ``key``. Values
            may lack the domain, which is then the service's own, and may have further labels, which are summed over.
        kind: counters and histograms only grow, and their increments are summed over replicas.
        merge: how the gauges of several replicas become one value; ``each`` publishes one series per replica.
        bounds: upper bounds of the buckets of a histogram.
        own: whether series carry the service's model or domain in front of ``by``.
        zeros: labels that are published as 0 before anything is counted, with an empty ``by`` always that of the row.
        history: whether the dashboard keeps the last hour.
        unit: the unit that the dashboard writes.
        listed: where the dashboard lists the value.
    """

    name: str
    key: str
    help: str
    by: tuple[str, ...] = ()
    read: Callable[[Source], Reading] | None = None
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    merge: Literal["sum", "mean", "each"] = "sum"
    bounds: tuple[float, ...] = ()
    own: bool = True
    zeros: tuple[Labels, ...] = ()
    history: bool = False
    unit: Literal["", "seconds", "bytes"] = ""
    listed: Listed | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the published series."""
        if self.name.startswith("vllm:"):
            return ("model_name", *self.by)
        return ("domain", *self.by) if self.own and "domain" not in self.by else self.by

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of its values in reports: those of a histogram are of its buckets and of its sum."""
        return (f"{self.key}_bucket", f"{self.key}_sum") if self.kind == "histogram" else (self.key,)

    def values(self, source: Source) -> Iterator[tuple[Name, float]]:
        """Read the source: each value with its name; empty buckets are left out."""
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
    """Name of the value of a key with these labels."""
    return (key, *labels) if labels else key


def acceptance_rate(accepted: float, drafted: float) -> float:
    """Accepted per drafted token, 0 when nothing was drafted."""
    return accepted / drafted if drafted else 0.0


def mean_acceptance_length(accepted: float, rounds: float) -> float:
    """Tokens per round that drafted, the bonus token included; 1 when there was none."""
    return 1.0 + accepted / rounds if rounds else 1.0


@dataclass
class SourceCounts:
    """Draft tokens that one source proposed, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, 0 when nothing was drafted."""
        return acceptance_rate(self.accepted, self.drafted)


@dataclass
class SpeculationCounts:
    """Draft and acceptance counts of one request or of many.

    ``accepted_per_position[i]`` counts the accepted draft tokens at depth ``i``; ``histogram[n]`` counts the rounds
    that accepted ``n`` tokens; ``by_source`` divides ``drafted`` and ``accepted`` by the source of the tokens.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    @classmethod
    def sum(cls, several: Iterable[SpeculationCounts]) -> SpeculationCounts:
        """The counts of ``several`` together."""
        total = cls()
        for counts in several:
            total.add(counts)
        return total

    def count(self, drafted: Mapping[str, int], accepted: Sequence[str]) -> None:
        """Count one round.

        Args:
            drafted: nodes of the draft by their source, one or more in all.
            accepted: the source of each accepted node in order of depth.
        """
        self.rounds += 1
        self.drafted += sum(drafted.values())
        self.accepted += len(accepted)
        _add(self.accepted_per_position, [1] * len(accepted))
        _add(self.histogram, [0] * len(accepted) + [1])
        for source, nodes in drafted.items():
            self._of(source).drafted += nodes
        for source in accepted:
            self._of(source).accepted += 1

    def add(self, other: SpeculationCounts) -> None:
        """Add the counts of ``other``."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        _add(self.accepted_per_position, other.accepted_per_position)
        _add(self.histogram, other.histogram)
        for source, counts in other.by_source.items():
            self._of(source).drafted += counts.drafted
            self._of(source).accepted += counts.accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, 0 when nothing was drafted."""
        return acceptance_rate(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 1 when nothing was drafted."""
        return mean_acceptance_length(self.accepted, self.rounds)

    def _of(self, source: str) -> SourceCounts:
        return self.by_source.setdefault(source, SourceCounts())


def _add(values: list[int], more: Sequence[int]) -> None:
    values.extend([0] * (len(more) - len(values)))
    for index, value in enumerate(more):
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
