"""Predictions with intervals for drafters near the measured points; other drafters are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from osd.analysis.scaling.figures import Baseline, Figures
from osd.analysis.scaling.law import Floats
from osd.analysis.scaling.model import Prediction, ScalingModel
from osd.analysis.scaling.points import Point, ScalingError

LEAST_POINTS, LEAST_SIZES, LEAST_AMOUNTS = 7, 3, 3
"""Smallest numbers of points, sizes and amounts of traffic for a fit of five constants with an error estimate."""

INTERVAL = 0.9
"""Share of the resampled predictions inside an interval."""

_RESAMPLES = 200
_DECADE = 10.0


@dataclass(frozen=True)
class Forecast:
    """Prediction with the lower and the upper end of the interval of each figure."""

    expected: Prediction
    least: Prediction
    most: Prediction


class Forecaster:
    """Forecaster of drafters from the points of a run.

    Intervals come from a bootstrap over points with 200 resamples: residuals are resampled, the model is fitted again,
    and the residual of a new point is added. They cover the scatter of points about the curves, but no other stream,
    target or machine.

    Attributes:
        points: points of the fit.
        model: fitted model.
        baseline: measurements that do not depend on the drafter.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        """Fit the model to ``points``.

        Raises:
            ScalingError: there are too few points, or they are from several runs.
        """
        self.points = list(points)
        _check(self.points)
        figures = Figures.of(self.points)
        self.baseline = Baseline.of(self.points)
        self.model = ScalingModel(figures, self.baseline)
        self._sizes = figures.parameters.min(), figures.parameters.max()
        self._amounts = figures.tokens.min(), figures.tokens.max()
        self._sparsest = (figures.tokens / figures.parameters).min()

    @classmethod
    def without(cls, held_out: Sequence[Point], points: Sequence[Point]) -> tuple[Self, list[Point]]:
        """Return a forecaster fitted without ``held_out``, and the held-out points that it can predict.

        Raises:
            ScalingError: too few points remain, or no held-out point can be predicted.
        """
        rest = cls([point for point in points if point not in held_out])
        refused = [rest.refusal(point.parameters, point.tokens) for point in held_out]
        if all(refused):
            raise ScalingError(str(refused[0]))
        return rest, [point for point, refusal in zip(held_out, refused, strict=True) if refusal is None]

    @cached_property
    def _resampled(self) -> list[tuple[ScalingModel, Floats]]:
        generator = np.random.default_rng(0)
        return [self.model.resampled(generator) for _ in range(_RESAMPLES)]

    def predict(self, parameters: float, tokens: float, depth: int | None = None) -> Forecast:
        """Predict a drafter with intervals.

        Args:
            parameters: trained parameters N.
            tokens: tokens of traffic D.
            depth: tokens of a draft; None for the fastest depth.

        Raises:
            ScalingError: the drafter is too far from the measured points.
        """
        refusal = self.refusal(parameters, tokens)
        if refusal is not None:
            raise ScalingError(refusal)
        expected = self.model.predict(parameters, tokens, depth)
        drawn: Floats = np.array(
            [model.predict(parameters, tokens, depth, residual).values() for model, residual in self._resampled]
        )
        outside = (1 - INTERVAL) / 2
        # Paybacks can be infinite, so quantiles must not average two values.
        least, most = np.quantile(drawn, (outside, 1 - outside), axis=0, method="nearest").tolist()
        return Forecast(expected, Prediction.of(least), Prediction.of(most))

    def refusal(self, parameters: float, tokens: float) -> str | None:
        """Return the reason why a drafter cannot be predicted; None if it can."""
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
        """Return N of a drafter with ``layers`` layers, interpolated between the smallest and the largest drafter."""
        small, large = (extreme(self.points, key=lambda point: point.layers) for extreme in (min, max))
        each = (large.parameters - small.parameters) / (large.layers - small.layers)
        return small.parameters + each * (layers - small.layers)


def largest(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return points to hold out, by name: the point with the largest N D, and all points of the largest drafter."""
    most = max(points, key=lambda point: point.parameters * point.tokens)
    size = max(point.parameters for point in points)
    return {"the largest run": [most], "the largest drafter": [point for point in points if point.parameters == size]}


def _check(points: Sequence[Point]) -> None:
    if any(point.run != points[0].run for point in points):
        raise ScalingError("the points are of several runs: other targets, streams or settings do not compare")
    sizes, amounts = len({point.parameters for point in points}), len({point.records for point in points})
    if len(points) < LEAST_POINTS or sizes < LEAST_SIZES or amounts < LEAST_AMOUNTS:
        raise ScalingError(
            f"the law needs {LEAST_POINTS} points of {LEAST_SIZES} sizes and {LEAST_AMOUNTS} amounts of traffic, "
            f"not {len(points)} of {sizes} and {amounts}"
        )
