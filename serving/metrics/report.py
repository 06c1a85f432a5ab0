"""Reports of replicas, and the totals over all replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, TypeGuard

from osd.capture.streams import StreamState
from osd.metrics import Name
from osd.registry.training import Training


@dataclass(frozen=True)
class Report:
    """Report of one replica, sent once a second or after the pause that ``ReplicaMetrics.push`` returns.

    Attributes:
        replica: name of the replica.
        time: seconds since the epoch.
        version: stable drafter version of the service's domain.
        speculation: whether speculation is switched on.
        counters: counters since the replica's start, with the names of ``Metric.values``.
        gauges: gauges, with the same names.
        canary: version that drafts in a share of the decoding steps, if any.
        domains: stable version of each other domain with drafters.
    """

    replica: str
    time: float
    version: int
    speculation: bool
    counters: Mapping[Name, float]
    gauges: Mapping[Name, float] = field(default_factory=dict)
    canary: int | None = None
    domains: Mapping[str, int] = field(default_factory=dict)


class TracedDrafts(TypedDict):
    """Draft tokens of traced requests by position; see ``trainer.live_drafts``."""

    domain: str
    version: int | str
    requests: int
    tested: list[int]
    accepted: list[int]


@dataclass(frozen=True)
class ServiceTotals:
    """Totals of the service.

    Attributes:
        counters: sums over all replicas that ever reported.
        replicas: last report of each live replica.
        training: report of the trainer, by domain.
        tried_since: start of the canary's trial in seconds since the epoch, by domain.
        streams: state of the trace stream, by domain.
        traced: acceptance of traced requests by domain and version; empty where replicas count their drafts.
    """

    counters: Mapping[Name, float]
    replicas: list[Report]
    training: Mapping[str, Training] = field(default_factory=dict)
    tried_since: Mapping[str, float] = field(default_factory=dict)
    streams: Mapping[str, StreamState] = field(default_factory=dict)
    traced: Sequence[TracedDrafts] = ()

    def by_label(self, key: str) -> dict[tuple[str | int, ...], float]:
        """Return the values of the counter ``key`` by its labels, in the order of the labels."""
        values = {
            name[1:]: value for name, value in self.counters.items() if isinstance(name, tuple) and name[0] == key
        }
        return dict(sorted(values.items(), key=lambda item: [(isinstance(label, int), label) for label in item[0]]))


def is_versioned(name: Name) -> TypeGuard[tuple[str | int, ...]]:
    """Return whether the first two labels of a name are a drafter's domain and version."""
    return isinstance(name, tuple) and str(name[0]).startswith("version_")
