"""What a model is fitted to: the figures of all points of one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from osd.analysis.scaling.law import Floats
from osd.analysis.scaling.points import Point

MEASURED = ("divergence", "sampled", "greedy", "step", "rest", "seconds")
"""Figures of a point that follow from its size and its traffic."""


@dataclass(frozen=True)
class Figures:
    """What was measured of each of n points, [n] each.

    Attributes:
        parameters: N, trained.
        tokens: D, distinct completion tokens trained on.
        divergence: forward KL in nats a token.
        sampled: acceptance at temperature 1, one minus the total variation.
        greedy: accepted / tested of greedy drafts.
        step: a forward of the drafter, in plain forwards.
        rest: what a round of the engine takes beside the forwards, in plain forwards.
        seconds: CPU seconds of training for each of ``tokens``.
    """

    parameters: Floats
    tokens: Floats
    divergence: Floats
    sampled: Floats
    greedy: Floats
    step: Floats
    rest: Floats
    seconds: Floats

    @classmethod
    def of(cls, points: Sequence[Point]) -> Self:
        """Of points of one run."""
        return cls(*(np.array(column, float) for column in zip(*(_row(point) for point in points), strict=True)))

    def values(self) -> Floats:
        """[n, figures] what was measured, in the order of ``MEASURED``."""
        return np.stack([getattr(self, name) for name in MEASURED], 1)

    def with_values(self, values: Floats) -> Self:
        """The same points, had ``values`` [n, figures] been measured."""
        return type(self)(self.parameters, self.tokens, *values.T)


def _row(point: Point) -> tuple[float, ...]:
    depth, costs = point.run.depth, point.costs
    return (
        point.parameters,
        point.tokens,
        point.divergence,
        1 - point.total_variation,
        point.agreement,
        costs.step,
        point.round_cost - depth * costs.step - costs.verify[depth - 1],
        point.cpu_seconds / point.tokens,
    )


@dataclass(frozen=True)
class Baseline:
    """What no drafter changes.

    A plain forward takes ``plain`` seconds on ``threads`` cores, and one that verifies n + 1 drafted tokens
    ``verify`` [n] times as long; ``entropy`` is the target's, in nats a token.
    """

    plain: float
    verify: tuple[float, ...]
    threads: int
    entropy: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> Self:
        """Medians over points of one run."""
        return cls(
            statistics.median(point.costs.plain for point in points),
            tuple(statistics.median(rows) for rows in zip(*(point.costs.verify for point in points), strict=True)),
            points[0].run.threads,
            statistics.median(point.entropy for point in points),
        )
