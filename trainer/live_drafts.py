"""Acceptance of live requests by domain, drafter version and position in the draft, counted from their traces."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, Trace
from osd.engine.counters import DraftedBy, version_entry

_POSITIONS = 16
"""Number of separate positions; deeper ones count as the last."""


@dataclass
class DraftCounts:
    """Draft tokens of the requests of one domain that one drafter version served.

    Attributes:
        requests: number of requests that the version began.
        tested: number of draft tokens that verification reached, by position.
        accepted: number of these that were accepted.
    """

    requests: int = 0
    tested: list[int] = field(default_factory=lambda: [0] * _POSITIONS)
    accepted: list[int] = field(default_factory=lambda: [0] * _POSITIONS)

    def add(self, other: DraftCounts) -> None:
        """Add the counts of ``other``."""
        self.requests += other.requests
        for counts, further in ((self.tested, other.tested), (self.accepted, other.accepted)):
            counts[:] = map(sum, zip(counts, further, strict=True))

    @classmethod
    def of(cls, trace: Trace) -> DraftCounts:
        """Return the counts of one trace.

        A draft begins after each token that is not an accepted draft token. Segments after the first are of a request
        that is counted already.
        """
        verdict = trace.verdict.numpy()
        index, accepted = np.arange(len(verdict)), verdict == ACCEPTED
        latest_end = np.maximum.accumulate(np.where(accepted, -1, index))
        before = np.concatenate(([-1], latest_end[:-1]))[: len(index)]
        position = np.minimum(index - before - 1, _POSITIONS - 1)
        tested, kept = (
            np.bincount(position[rows], minlength=_POSITIONS).tolist() for rows in (verdict != NOT_DRAFTED, accepted)
        )
        return cls(int(trace.segment == 0), tested, kept)


class LiveDrafts:
    """Counts of all traces since the start; the number of domains and versions is limited, see ``version_entry``."""

    def __init__(self) -> None:
        self._counts: dict[DraftedBy, DraftCounts] = {}
        self._lock = threading.Lock()

    def add(self, trace: Trace) -> None:
        """Count a trace under the domain of its request."""
        counts = DraftCounts.of(trace)
        with self._lock:
            version_entry(self._counts, (trace.domain, trace.drafter_version), DraftCounts).add(counts)

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts of each domain and version that drafted, as JSON; thread-safe."""
        rows: list[dict[str, Any]] = []
        with self._lock:
            for (domain, version), counts in self._counts.items():
                if reached := sum(count > 0 for count in counts.tested):
                    row = {"domain": domain, "version": version, "requests": counts.requests}
                    rows.append({**row, "tested": counts.tested[:reached], "accepted": counts.accepted[:reached]})
        return sorted(rows, key=lambda row: (row["domain"], str(row["version"])))
