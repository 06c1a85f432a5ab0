"""What replicas report of themselves, and the totals over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from osd.capture.streams import StreamState
from osd.metrics import Name
from osd.registry.training import Training


@dataclass(frozen=True)
class Report:
    """One replica's report, sent once a second or as often as ``ReplicaMetrics.push`` asks for it.

    ``version`` is the stable one, and ``canary`` drafts in a share of the steps; ``others`` are the versions of other
    domains. ``counters`` since the replica's start and ``gauges`` are named as ``Metric.values`` names them.
    """

    replica: str
    time: float
    version: int
    speculation: bool
    counters: Mapping[Name, float]
    gauges: Mapping[Name, float] = field(default_factory=dict)
    canary: int | None = None
    others: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """Counters summed over every replica that ever reported, and the last report of each living one.

    The rest is the trainer's: by domain its ``training``, the start of a canary's trial in ``tried_since``, and the
    state of its stream in ``streams``.
    """

    counters: Mapping[Name, float]
    replicas: list[Report]
    training: Mapping[str, Training] = field(default_factory=dict)
    tried_since: Mapping[str, float] = field(default_factory=dict)
    streams: Mapping[str, StreamState] = field(default_factory=dict)

    def by_label(self, key: str) -> dict[tuple[str | int, ...], float]:
        """The values of a key by its labels, in order."""
        found = {name[1:]: value for name, value in self.counters.items() if isinstance(name, tuple) and name[0] == key}
        return dict(sorted(found.items(), key=lambda item: [(isinstance(label, int), label) for label in item[0]]))


def is_versioned(name: Name) -> TypeGuard[tuple[str | int, ...]]:
    """Whether a name has a drafter's domain and version as its first labels."""
    return isinstance(name, tuple) and str(name[0]).startswith("version_")
