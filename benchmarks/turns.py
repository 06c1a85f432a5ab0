"""Ways that are compared in turns, and the figures of several turns."""

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
    """Return the ways in the order of a turn: another one begins each time."""
    place = turn % len(ways)
    return [*ways[place:], *ways[:place]]


def in_turns(
    ways: Mapping[str, Callable[[int], T]],
    turns: int,
    report: Callable[[str], None] = lambda step: None,
    warm_up: int = 1,
) -> Iterator[tuple[str, T]]:
    """Run every way once a turn, and yield the name and result of each run.

    Args:
        ways: By name, a function that is called with the number of the turn, from 0 with the warm-up.
        turns: Turns that are yielded.
        report: Called with a sentence before each turn.
        warm_up: Turns before these, whose results are dropped.
    """
    for turn in range(warm_up + turns):
        report(f"turn {max(turn - warm_up + 1, 0)} of {turns}")
        for name in rotated(list(ways), turn):
            result = ways[name](turn)
            if turn >= warm_up:
                yield name, result


def by_way(results: Iterator[tuple[str, T]]) -> dict[str, list[T]]:
    """Return the results of each way, in the order of the turns."""
    found: dict[str, list[T]] = defaultdict(list)
    for name, result in results:
        found[name].append(result)
    return found


@dataclass(frozen=True)
class Spread:
    """Median, least and largest of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Return all three, each times ``scale``."""
        middle, least, most = (f"{value * scale:.{digits}f}" for value in (self.median, self.least, self.most))
        return f"{middle} ({least} to {most})"


def ratios(these: Sequence[float], those: Sequence[float]) -> Spread:
    """Return the ratios within each turn."""
    return Spread.of([a / b for a, b in zip(these, those, strict=True)])


@dataclass(frozen=True)
class Mean:
    """A mean over contexts and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """Summarise one value [N] for each context."""
        spread = float(values.std()) if len(values) > 1 else 0.0
        return cls(float(values.mean()), spread / math.sqrt(len(values)))

    @property
    def below_zero(self) -> bool:
        """Whether the mean is below zero by more than three standard errors."""
        return self.value < -_SIGMAS * self.error - 1e-6

    def text(self) -> str:
        """Return mean and error."""
        return f"{self.value:.3f} ±{self.error:.2f}"
