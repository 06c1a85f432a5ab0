"""Alternating measurement of several ways, and statistics over the turns.

A way is one of the configurations that a benchmark compares. A turn runs each way once.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

_SIGMAS = 3.0
T = TypeVar("T")


def rotated(ways: Sequence[T], turn: int) -> list[T]:
    """Return the ways in the order of a turn, so that each turn starts with another way."""
    start = turn % len(ways)
    return [*ways[start:], *ways[:start]]


def in_turns(
    ways: Mapping[str, Callable[[int], T]],
    turns: int,
    report: Callable[[str], None] = lambda sentence: None,
    warm_up: int = 1,
) -> Iterator[tuple[str, T]]:
    """Run every way once per turn, and yield the name and result of each run.

    Each way is called with the number of the turn, counted from 0. The results of the first ``warm_up`` turns are
    dropped, and ``turns`` turns follow. ``report`` gets a sentence before each turn.
    """
    for turn in range(warm_up + turns):
        report(f"turn {max(turn - warm_up + 1, 0)} of {turns}")
        for name in rotated(list(ways), turn):
            result = ways[name](turn)
            if turn >= warm_up:
                yield name, result


def by_way(results: Iterator[tuple[str, T]]) -> dict[str, list[T]]:
    """Return the results of each way in the order of the turns."""
    grouped: dict[str, list[T]] = defaultdict(list)
    for name, result in results:
        grouped[name].append(result)
    return grouped


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest value of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Return the three values as text, each multiplied by ``scale``."""
        median, least, most = (f"{value * scale:.{digits}f}" for value in (self.median, self.least, self.most))
        return f"{median} ({least} to {most})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios within each turn."""
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True)
class Mean:
    """Mean over contexts with its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """Return the mean of one value per context, [N]."""
        spread = float(values.std()) if len(values) > 1 else 0.0
        return cls(float(values.mean()), spread / math.sqrt(len(values)))

    @property
    def below_zero(self) -> bool:
        """Whether the mean is below zero by more than three standard errors."""
        return self.value < -_SIGMAS * self.error - 1e-6

    def text(self) -> str:
        """Return "mean ±error" with three and two decimal places."""
        return f"{self.value:.3f} ±{self.error:.2f}"
