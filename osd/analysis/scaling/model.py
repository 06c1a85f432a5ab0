"""From a drafter's size and its traffic to divergence, acceptance, speed and payback."""

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
"""The largest acceptance: a chain of any length is finite."""


@dataclass(frozen=True)
class Decoding:
    """Drafting chains of ``depth`` tokens, each of them accepted with probability ``acceptance``.

    A round gives ``length`` tokens, and decoding is ``speedup`` times as fast as plain. After ``payback`` served tokens
    the seconds saved are those of training; infinite where none are saved.
    """

    acceptance: float
    depth: float
    length: float
    speedup: float
    payback: float


@dataclass(frozen=True)
class Prediction:
    """What is expected of a drafter.

    ``divergence`` is in nats a token, ``step`` the drafter's forward in plain forwards, ``seconds`` the CPU seconds of
    training; ``sampled`` is decoding at temperature 1, ``greedy`` at temperature 0.
    """

    divergence: float
    step: float
    seconds: float
    sampled: Decoding
    greedy: Decoding

    def values(self) -> list[float]:
        """All figures in one row."""
        return [self.divergence, self.step, self.seconds, *astuple(self.sampled), *astuple(self.greedy)]

    @classmethod
    def of(cls, row: Sequence[float]) -> Self:
        """From such a row."""
        divergence, step, seconds, *ways = row
        width = len(fields(Decoding))
        return cls(divergence, step, seconds, Decoding(*ways[:width]), Decoding(*ways[width:]))


@dataclass(frozen=True)
class Line:
    """``base`` + ``slope`` N, neither of them below 0."""

    base: float
    slope: float

    @classmethod
    def through(cls, parameters: Floats, values: Floats) -> Self:
        """The one with the least sum of squared distances from ``values`` [n] at ``parameters`` [n]."""
        scale = parameters.max()
        base, slope = nnls(np.stack([np.ones_like(parameters), parameters / scale], 1), values)[0]
        return cls(float(base), float(slope / scale))

    def at(self, parameters: Floats) -> Floats:
        """Its value for each N."""
        return self.base + self.slope * parameters


class Model:
    """Everything that is fitted to the points of one run.

    Attributes:
        fit: the law of the divergence, which is the loss above the target's entropy. Of the two forms the one with the
            lower criterion; ``other`` is the other one.
        sampled: from divergence to acceptance at temperature 1.
        greedy: the same at temperature 0.
        step: the drafter's forward by N, in plain forwards.
        rest: what a round takes beside its forwards, in plain forwards.
        seconds: of training on a token, by N.
    """

    def __init__(self, figures: Figures, baseline: Baseline, before: Model | None = None) -> None:
        """Fit ``figures``; the law of the same form as that of ``before``, and from there, where it is given."""
        self._figures, self._baseline = figures, baseline
        data = figures.parameters, figures.tokens, figures.divergence
        if before is None:
            self.fit, self.other = sorted((fit(*data, tied=tied) for tied in (True, False)), key=lambda f: f.criterion)
        else:
            self.fit, self.other = fit(*data, tied=before.fit.tied, start=before.fit.law), before.other
        self.sampled = fit_acceptance(figures.divergence, figures.sampled, pinsker=True)
        self.greedy = fit_acceptance(figures.divergence, figures.greedy, pinsker=False)
        self.step = Line.through(figures.parameters, figures.step)
        self.rest = float(np.median(figures.rest))
        self.seconds = Line.through(figures.parameters, figures.seconds)

    def _expected(self, parameters: Floats, divergence: Floats) -> Floats:
        """[n, figures] what the fitted curves say, in the order of ``MEASURED``; acceptance at this divergence."""
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
        self, parameters: float, tokens: float, depth: int | None = None, off: Floats | None = None
    ) -> Prediction:
        """What a drafter of N ``parameters`` will be after D ``tokens``.

        Args:
            parameters: that are trained.
            tokens: distinct completion tokens to train on.
            depth: tokens of a draft, else as many as decode fastest.
            off: [figures] how far what is measured will lie off the fitted curves, in the order of ``MEASURED``.
        """
        off = np.zeros(len(MEASURED)) if off is None else off
        divergence = np.maximum(self.fit.law.loss([parameters], [tokens]) + off[0], 0.0)
        expected = self._expected(np.array([parameters]), divergence)[0] + np.array([0.0, *off[1:]])
        _, sampled, greedy, step, rest, seconds = (float(value) for value in expected)
        seconds *= tokens
        ways = (self._decoding(one, step, rest, seconds, depth) for one in (sampled, greedy))
        return Prediction(float(divergence[0]), step, seconds, *ways)

    def _decoding(self, acceptance: float, step: float, rest: float, seconds: float, depth: int | None) -> Decoding:
        acceptance = min(max(acceptance, 0.0), _NEARLY_ALL)
        plain, verify = self._baseline.plain, self._baseline.verify
        choice: list[Decoding] = []
        for k in range(1, len(verify) + 1) if depth is None else [depth]:
            length = (1 - acceptance ** (k + 1)) / (1 - acceptance)
            speedup = length / max(k * step + verify[k - 1] + rest, 1.0)  # no round is shorter than a plain forward
            saved = plain * self._baseline.threads * (1 - 1 / speedup)
            choice.append(Decoding(acceptance, k, length, speedup, seconds / saved if saved > 0 else math.inf))
        return max(choice, key=lambda one: one.speedup)

    def resampled(self, generator: np.random.Generator) -> tuple[Model, Floats]:
        """A model fitted to other points that these might have been, and how far a new one may lie off its curves.

        What the points lie off the curves is dealt out among them again, all figures of a point together, as large as
        it is expected to be where nothing was fitted to it.
        """
        figures = self._figures
        fitted = self.fit.law.loss(figures.parameters, figures.tokens)
        off = figures.values() - self._expected(figures.parameters, figures.divergence)
        off[:, 0] = figures.divergence - fitted
        points = len(off)
        free = np.array([constants(self.fit.tied), 2, 2, 2, 1, 2])
        off *= np.sqrt(points / (points - free))
        off -= off.mean(0)
        drawn = off[generator.integers(points, size=points)]
        divergence = np.maximum(fitted + drawn[:, 0], 0.0)
        values = self._expected(figures.parameters, divergence)
        values[:, 1:] += drawn[:, 1:]
        again = figures.with_values(values)
        return Model(again, self._baseline, before=self), off[generator.integers(points)]
