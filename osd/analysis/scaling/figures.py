"""Figures of the points of a run as arrays, to which a model is fitted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from osd.analysis.scaling.law import Floats
from osd.analysis.scaling.points import Point

MEASURED = ("divergence", "sampled", "greedy", "step", "rest", "seconds")
"""Names of the figures that depend on size and traffic."""


@dataclass(frozen=True)
class Figures:
    """Measurements of n points; each attribute has shape [n].

    Attributes:
        parameters: trained parameters N.
        tokens: distinct completion tokens D in the training data.
        divergence: forward KL in nats per token.
        sampled: acceptance at temperature 1, which is one minus the total variation.
        greedy: accepted / tested tokens of greedy drafts.
        step: time of a drafter forward, in plain forwards.
        rest: time of a decoding step outside of forwards, in plain forwards.
        seconds: CPU seconds of training per token of ``tokens``.
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
        """Return the figures of the points in their order; all points belong to the same run."""
        return cls(*(np.array(column, float) for column in zip(*(_row(point) for point in points), strict=True)))

    def values(self) -> Floats:
        """Return the measurements [n, figures] in the order of ``MEASURED``."""
        return np.stack([getattr(self, name) for name in MEASURED], 1)

    def with_values(self, values: Floats) -> Self:
        """Return the same points with the measurements ``values`` [n, figures]."""
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
    """Measurements that do not depend on the drafter.

    Attributes:
        plain: seconds of a plain forward.
        verify: time of a forward that verifies n + 1 drafted tokens, in plain forwards, at index n.
        threads: cores in use.
        entropy: entropy of the target in nats per token.
    """

    plain: float
    verify: tuple[float, ...]
    threads: int
    entropy: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> Self:
        """Return the medians over points of the same run."""
        return cls(
            statistics.median(point.costs.plain for point in points),
            tuple(statistics.median(rows) for rows in zip(*(point.costs.verify for point in points), strict=True)),
            points[0].run.threads,
            statistics.median(point.entropy for point in points),
        )
