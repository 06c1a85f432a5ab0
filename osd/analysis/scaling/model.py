"""Model that predicts divergence, acceptance, speed and payback of a drafter from its size and traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Self

import numpy as np
from scipy.optimize import nnls

from osd.analysis.scaling.figures import MEASURED, Baseline, Figures
from osd.analysis.scaling.law import Floats, constants, fit, fit_acceptance

_NEARLY_ALL = 1 - 1e-6
"""Upper bound on the acceptance, which keeps the geometric sum finite."""


@dataclass(frozen=True)
class Decoding:
    """Decoding with draft chains.

    Attributes:
        acceptance: probability that a draft token is accepted.
        depth: tokens of a draft.
        length: tokens per decoding step.
        speedup: speed relative to plain decoding.
        payback: served tokens until the saved seconds equal those of training; infinite without savings.
    """

    acceptance: float
    depth: float
    length: float
    speedup: float
    payback: float


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a drafter.

    Attributes:
        divergence: forward KL in nats per token.
        step: time of a drafter forward, in plain forwards.
        seconds: CPU seconds of training.
        sampled: decoding at temperature 1.
        greedy: decoding at temperature 0.
    """

    divergence: float
    step: float
    seconds: float
    sampled: Decoding
    greedy: Decoding

    def values(self) -> list[float]:
        """Return all figures as a flat list."""
        return [self.divergence, self.step, self.seconds, *astuple(self.sampled), *astuple(self.greedy)]

    @classmethod
    def of(cls, row: Sequence[float]) -> Self:
        """Return the prediction with the figures ``row``, in the order of ``values``."""
        divergence, step, seconds, *ways = row
        width = len(fields(Decoding))
        return cls(divergence, step, seconds, Decoding(*ways[:width]), Decoding(*ways[width:]))


@dataclass(frozen=True)
class LinearFit:
    """Linear function ``base`` + ``slope`` N with non-negative coefficients."""

    base: float
    slope: float

    @classmethod
    def through(cls, parameters: Floats, values: Floats) -> Self:
        """Return the least-squares fit to ``values`` [n] at ``parameters`` [n]."""
        scale = parameters.max()
        base, slope = nnls(np.stack([np.ones_like(parameters), parameters / scale], 1), values)[0]
        return cls(float(base), float(slope / scale))

    def at(self, parameters: Floats) -> Floats:
        """Return the value for each N."""
        return self.base + self.slope * parameters


class ScalingModel:
    """Model that is fitted to the points of a run.

    Attributes:
        fit: law of the divergence, which is the loss minus the target's entropy, in the form with the lower criterion.
        other: law in the other form.
        sampled: map from divergence to acceptance at temperature 1.
        greedy: map from divergence to acceptance at temperature 0.
        step: time of a drafter forward by N, in plain forwards.
        rest: time of a decoding step outside of forwards, in plain forwards.
        seconds: CPU seconds of training per token, by N.
    """

    def __init__(self, figures: Figures, baseline: Baseline, before: ScalingModel | None = None) -> None:
        """Fit the model to ``figures``; with ``before``, use the form of its law and start the search there."""
        self._figures, self._baseline = figures, baseline
        data = figures.parameters, figures.tokens, figures.divergence
        if before is None:
            self.fit, self.other = sorted((fit(*data, tied=tied) for tied in (True, False)), key=lambda f: f.criterion)
        else:
            self.fit, self.other = fit(*data, tied=before.fit.tied, start=before.fit.law), before.other
        self.sampled = fit_acceptance(figures.divergence, figures.sampled, pinsker=True)
        self.greedy = fit_acceptance(figures.divergence, figures.greedy, pinsker=False)
        self.step = LinearFit.through(figures.parameters, figures.step)
        self.rest = float(np.median(figures.rest))
        self.seconds = LinearFit.through(figures.parameters, figures.seconds)

    def _expected(self, parameters: Floats, divergence: Floats) -> Floats:
        """Return the values of the fitted curves, [n, figures], in the order of ``MEASURED``."""
        return np.stack(
            [
                divergence,
                self.sampled.acceptance(divergence),
                self.greedy.acceptance(divergence),
                self.step.at(parameters),
                np.full(len(parameters), self.rest),
                self.seconds.at(parameters),
            ],
            1,
        )

    def predict(
        self, parameters: float, tokens: float, depth: int | None = None, residual: Floats | None = None
    ) -> Prediction:
        """Predict a drafter.

        Args:
            parameters: trained parameters N.
            tokens: distinct completion tokens D of the training data.
            depth: tokens of a draft; None for the fastest depth.
            residual: [figures] deviation of the measurement from the fitted curves, in the order of ``MEASURED``.
        """
        residual = np.zeros(len(MEASURED)) if residual is None else residual
        divergence = np.maximum(self.fit.law.loss([parameters], [tokens]) + residual[0], 0.0)
        expected = self._expected(np.array([parameters]), divergence)[0] + np.array([0.0, *residual[1:]])
        _, sampled, greedy, step, rest, seconds = (float(value) for value in expected)
        seconds *= tokens
        ways = (self._decoding(acceptance, step, rest, seconds, depth) for acceptance in (sampled, greedy))
        return Prediction(float(divergence[0]), step, seconds, *ways)

    def _decoding(self, acceptance: float, step: float, rest: float, seconds: float, depth: int | None) -> Decoding:
        acceptance = min(max(acceptance, 0.0), _NEARLY_ALL)
        plain, verify = self._baseline.plain, self._baseline.verify
        choice: list[Decoding] = []
        for k in range(1, len(verify) + 1) if depth is None else [depth]:
            length = (1 - acceptance ** (k + 1)) / (1 - acceptance)
            speedup = length / max(k * step + verify[k - 1] + rest, 1.0)  # a step takes at least a plain forward
            saved = plain * self._baseline.threads * (1 - 1 / speedup)
            choice.append(Decoding(acceptance, k, length, speedup, seconds / saved if saved > 0 else math.inf))
        return max(choice, key=lambda decoding: decoding.speedup)

    def resampled(self, generator: np.random.Generator) -> tuple[ScalingModel, Floats]:
        """Return a model fitted to resampled points, and a drawn ``residual`` [figures] of a new point for ``predict``.

        Residuals of whole points are resampled with replacement. They are scaled up to the size that is expected for
        points that were not fitted.
        """
        figures = self._figures
        fitted = self.fit.law.loss(figures.parameters, figures.tokens)
        residuals = figures.values() - self._expected(figures.parameters, figures.divergence)
        residuals[:, 0] = figures.divergence - fitted
        points = len(residuals)
        free = np.array([constants(self.fit.tied), 2, 2, 2, 1, 2])
        residuals *= np.sqrt(points / (points - free))
        residuals -= residuals.mean(0)
        drawn = residuals[generator.integers(points, size=points)]
        divergence = np.maximum(fitted + drawn[:, 0], 0.0)
        values = self._expected(figures.parameters, divergence)
        values[:, 1:] += drawn[:, 1:]
        resampled = figures.with_values(values)
        return ScalingModel(resampled, self._baseline, before=self), residuals[generator.integers(points)]
