"""Acceptance along a stream, and how soon it rises."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.adaptation.offline_acceptance import Counts, total

SHARES = (0.5, 0.8, 0.9)
"""Parts of the gain that are looked for."""


def windows(counts: Sequence[Counts], size: int) -> list[tuple[int, Counts]]:
    """Counts of each ``size`` records together, with the number of records at the end of each; the rest is the last."""
    found = []
    for start in range(0, len(counts), size):
        part = counts[start : start + size]
        found.append((start + len(part), total(part)))
    return found


@dataclass(frozen=True)
class Rise:
    """Agreement over the first and the last ``window`` records, and records until parts of the gain were reached.

    Agreement is accepted / tested. ``records`` [SHARES] counts up to the end of the first window that is so far above
    the first one; None where no window is, or where nothing was gained.
    """

    window: int
    first: float
    last: float
    records: tuple[int | None, ...]

    @property
    def gain(self) -> float:
        """How much agreement rose."""
        return self.last - self.first

    @classmethod
    def of(cls, counts: Sequence[Counts], window: int) -> Rise:
        """Of the records of a stream, in order."""
        window = max(min(window, len(counts)), 1)
        levels = [total(counts[end - window : end]).agreement for end in range(window, len(counts) + 1)]
        first, last = levels[0], levels[-1]
        records: list[int | None] = []
        for share in SHARES:
            needed = first + share * (last - first)
            there = (window + index for index, level in enumerate(levels) if level >= needed)
            records.append(next(there, None) if last > first else None)
        return cls(window, first, last, tuple(records))


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: mean, least, largest."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all seeds."""
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        """The mean, and the range where there is more than one seed."""
        if len(self.values) == 1:
            return f"{self.values[0]:.3f}"
        return f"{self.mean:.3f} ({min(self.values):.3f} to {max(self.values):.3f})"
