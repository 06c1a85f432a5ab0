"""Predictions with intervals, for drafters that the points can speak of; others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from osd.analysis.scaling.figures import Baseline, Figures
from osd.analysis.scaling.law import Floats
from osd.analysis.scaling.model import Model, Prediction
from osd.analysis.scaling.points import Point, ScalingError

LEAST_POINTS, LEAST_SIZES, LEAST_AMOUNTS = 7, 3, 3
"""Points, and distinct sizes and amounts of traffic among them, that five constants can be fitted to and judged by."""

INTERVAL = 0.9
"""Share of the resampled predictions that an interval holds."""

_RESAMPLES = 200
_DECADE = 10.0


@dataclass(frozen=True)
class Forecast:
    """A prediction, and the least and the largest value of each figure in its interval."""

    expected: Prediction
    least: Prediction
    most: Prediction


class Forecaster:
    """Predicts drafters from the points of one run.

    Intervals are from a bootstrap over points: 200 times the points' residuals are dealt out again, everything is
    fitted to the points that result, and a new point's own residual is added. They cover what points scatter about the
    curves, and no other stream, target or machine.

    Attributes:
        points: the fit is to.
        model: the fit.
        baseline: what no drafter changes.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        """Fit to ``points``.

        Raises:
            ScalingError: there are too few, or they are not of one run.
        """
        self.points = list(points)
        _check(self.points)
        figures = Figures.of(self.points)
        self.baseline = Baseline.of(self.points)
        self.model = Model(figures, self.baseline)
        self._sizes = figures.parameters.min(), figures.parameters.max()
        self._amounts = figures.tokens.min(), figures.tokens.max()
        self._sparsest = (figures.tokens / figures.parameters).min()

    @classmethod
    def without(cls, held: Sequence[Point], points: Sequence[Point]) -> tuple[Self, list[Point]]:
        """Fitted to all ``points`` but those ``held`` out, and those of them which it can predict.

        Raises:
            ScalingError: what is left are too few points, or it can predict none of them.
        """
        rest = cls([point for point in points if point not in held])
        refused = [rest.refusal(point.parameters, point.tokens) for point in held]
        if all(refused):
            raise ScalingError(str(refused[0]))
        return rest, [point for point, refusal in zip(held, refused, strict=True) if refusal is None]

    @cached_property
    def _resampled(self) -> list[tuple[Model, Floats]]:
        generator = np.random.default_rng(0)
        return [self.model.resampled(generator) for _ in range(_RESAMPLES)]

    def predict(self, parameters: float, tokens: float, depth: int | None = None) -> Forecast:
        """What a drafter of N ``parameters`` will be after D ``tokens``, with chains of ``depth`` or the best one.

        Raises:
            ScalingError: the points say nothing of such a drafter.
        """
        refusal = self.refusal(parameters, tokens)
        if refusal is not None:
            raise ScalingError(refusal)
        expected = self.model.predict(parameters, tokens, depth)
        drawn: Floats = np.array(
            [model.predict(parameters, tokens, depth, off).values() for model, off in self._resampled]
        )
        outside = (1 - INTERVAL) / 2
        # Infinite paybacks are values like others: no mean of two of them is taken.
        least, most = np.quantile(drawn, (outside, 1 - outside), axis=0, method="nearest").tolist()
        return Forecast(expected, Prediction.of(least), Prediction.of(most))

    def refusal(self, parameters: float, tokens: float) -> str | None:
        """Why the points say nothing of a drafter, None where they do."""
        for name, value, (least, most) in (
            ("parameters", parameters, self._sizes),
            ("tokens of traffic", tokens, self._amounts),
        ):
            if not least / _DECADE <= value <= most * _DECADE:
                return (
                    f"{value:,.0f} {name} are more than a decade outside of the {least:,.0f} to {most:,.0f} "
                    "that were measured"
                )
        if tokens / parameters < self._sparsest * (1 - 1e-9):
            return (
                f"{tokens:,.0f} tokens of traffic for {parameters:,.0f} parameters are fewer for each parameter than "
                f"any drafter was measured with: {self._sparsest * parameters:,.0f} are the least"
            )
        return None

    def parameters_of(self, layers: int) -> float:
        """N of a drafter of so many layers, by the largest and the smallest that were measured."""
        small, large = (extreme(self.points, key=lambda point: point.layers) for extreme in (min, max))
        each = (large.parameters - small.parameters) / (large.layers - small.layers)
        return small.parameters + each * (layers - small.layers)


def largest(points: Sequence[Point]) -> dict[str, list[Point]]:
    """What to hold out, by name: the point with the most compute, N D, and all points of the largest drafter."""
    most = max(points, key=lambda point: point.parameters * point.tokens)
    size = max(point.parameters for point in points)
    return {"the largest run": [most], "the largest drafter": [one for one in points if one.parameters == size]}


def _check(points: Sequence[Point]) -> None:
    if any(point.run != points[0].run for point in points):
        raise ScalingError("the points are of several runs: other targets, streams or settings do not compare")
    sizes, amounts = len({point.parameters for point in points}), len({point.records for point in points})
    if len(points) < LEAST_POINTS or sizes < LEAST_SIZES or amounts < LEAST_AMOUNTS:
        raise ScalingError(
            f"the law needs {LEAST_POINTS} points of {LEAST_SIZES} sizes and {LEAST_AMOUNTS} amounts of traffic, "
            f"not {len(points)} of {sizes} and {amounts}"
        )
