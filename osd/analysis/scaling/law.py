"""Scaling law of the loss in parameters and training tokens, and the acceptance rate at that loss.

L(N, D) = E + A N^-a + B D^-b, Hoffmann et al., "Training Compute-Optimal Large Language Models" (arXiv 2203.15556);
with a = b the form of Gadre et al., "Language models scale reliably with over-training and on downstream tasks"
(arXiv 2403.08540), whose eta is half of the exponent.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares, minimize_scalar

Floats = NDArray[np.float64]

_EXPONENTS = (0.1, 0.3, 1.0)
_FLOORS = (0.0, 0.7)  # as a share of the least loss
_SHARES = (0.3, 0.7)  # share of the parameters in the loss above the floor
"""Starting points of the search; every combination is used."""

_STEEPEST = 4.0
_LEAST_LOG = -25.0
"""Lower bound on the logarithm of a term, at which the term is negligible."""


_RATES = np.geomspace(1e-3, 1e2, 61)
"""Starting points of the rate of the map, multiplied by the mean divergence."""


@dataclass(frozen=True)
class Law:
    """Law E + A N^-a + B D^-b with the floor E, and a factor and an exponent for parameters N and tokens D."""

    floor: float
    size_factor: float
    size_exponent: float
    data_factor: float
    data_exponent: float

    def loss(self, parameters: ArrayLike, tokens: ArrayLike) -> Floats:
        """Return L for each pair of N and D, in the unit of the fitted losses."""
        n, d = np.asarray(parameters, float), np.asarray(tokens, float)
        return self.floor + self.size_factor * n**-self.size_exponent + self.data_factor * d**-self.data_exponent


@dataclass(frozen=True)
class Fit:
    """Fitted law.

    Attributes:
        law: the law.
        tied: whether both exponents are equal.
        error: root mean square distance of the losses.
        criterion: Akaike's criterion, corrected for few points; a lower value predicts better.
    """

    law: Law
    tied: bool
    error: float
    criterion: float


def constants(tied: bool) -> int:
    """Return the number of constants of a law."""
    return 4 if tied else 5


def fit(parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, *, tied: bool, start: Law | None = None) -> Fit:
    """Fit a law to losses by least squares; the floor is at least 0 and exponents lie between 0 and 4.

    Args:
        parameters: N of each point.
        tokens: D of each point.
        losses: L of each point.
        tied: whether both exponents are equal.
        start: starting point of the search; None for a grid of starting points.
    """
    n, d, measured = (np.asarray(values, float) for values in (parameters, tokens, losses))
    # Relative to the middle of the points, the factor of a term does not depend on its exponent.
    middle = np.array([np.log(n).mean(), np.log(d).mean()])
    logs = np.stack([np.log(n), np.log(d)], 1) - middle  # [points, 2]
    lower, upper = [0.0, _LEAST_LOG, _LEAST_LOG, 0.0], [max(measured.min(), 1e-9), 25.0, 25.0, _STEEPEST]
    if not tied:
        lower, upper = [*lower, 0.0], [*upper, _STEEPEST]

    def terms(values: Floats) -> Floats:
        """Return the terms of the parameters and the tokens, [points, 2]."""
        return np.exp(values[1:3] - values[3:] * logs)

    def distances(values: Floats) -> Floats:
        return values[0] + terms(values).sum(1) - measured

    def slopes(values: Floats) -> Floats:
        added = terms(values)
        steep = -added * logs
        return np.concatenate(
            [np.ones((len(measured), 1)), added, steep.sum(1, keepdims=True) if tied else steep], axis=1
        )

    if start is None:
        starts = _grid(measured, tied)
    else:
        factors = np.array([start.size_factor, start.data_factor])
        exponents = np.array([start.size_exponent, start.data_exponent])
        begin = np.log(np.maximum(factors, 1e-300)) - exponents * middle
        starts = [np.array([start.floor, *begin, *exponents[: 1 if tied else 2]])]
    solutions = [
        least_squares(
            distances,
            np.clip(values, lower, upper),
            jac=slopes,  # type: ignore[arg-type] # scipy takes a function; only its default is a string
            bounds=(lower, upper),
            x_scale="jac",
        )
        for values in starts
    ]
    best = min(solutions, key=lambda solution: float(solution.cost)).x
    exponents = np.broadcast_to(best[3:], 2)
    factors = np.exp(best[1:3] + exponents * middle)
    law = Law(float(best[0]), float(factors[0]), float(exponents[0]), float(factors[1]), float(exponents[1]))
    square = float(np.square(distances(best)).mean())
    return Fit(law, tied, math.sqrt(square), _akaike(square, len(measured), constants(tied)))


def _grid(measured: Floats, tied: bool) -> list[Floats]:
    starts: list[Floats] = []
    for floor, share, *exponents in itertools.product(_FLOORS, _SHARES, *[_EXPONENTS] * (1 if tied else 2)):
        above = measured.mean() - floor * measured.min()
        factors = np.log(np.maximum([share * above, (1 - share) * above], 1e-9))
        starts.append(np.array([floor * measured.min(), *factors, *exponents]))
    return starts


def _akaike(square: float, points: int, free: int) -> float:
    """Return Akaike's criterion of a least-squares fit with the mean squared distance ``square``."""
    rest = points - free - 1
    penalty = 2 * free * (1 + (free + 1) / rest) if rest > 0 else math.inf
    return points * math.log(max(square, 1e-300)) + penalty


@dataclass(frozen=True)
class AcceptanceMap:
    """Map from forward KL to the share of rejected tokens: ``limit`` (1 - exp(-``rate`` KL)).

    With ``pinsker`` the share is the total variation at temperature 1, which is at most sqrt(KL / 2) by Pinsker's
    inequality.
    """

    limit: float
    rate: float
    pinsker: bool

    def acceptance(self, divergence: ArrayLike) -> Floats:
        """Return the accepted share at each forward KL in nats per token; negative KL counts as 0."""
        above = np.maximum(np.asarray(divergence, float), 0.0)
        rejected = self.limit * -np.expm1(-self.rate * above)
        return 1 - (np.minimum(rejected, np.sqrt(above / 2)) if self.pinsker else rejected)


def fit_acceptance(divergences: ArrayLike, accepted: ArrayLike, *, pinsker: bool) -> AcceptanceMap:
    """Fit a map to the accepted shares at some divergences by least squares; the fit ignores Pinsker's bound."""
    kl, rejected = np.asarray(divergences, float), 1 - np.asarray(accepted, float)
    mean = max(float(kl.mean()), 1e-9)

    def best(rates: Floats) -> tuple[Floats, Floats]:
        """Return the best limit for each of ``rates`` [r], and its sum of squared distances."""
        shape = -np.expm1(-rates[:, None] / mean * kl)  # [r, points]
        limits = np.clip(shape @ rejected / np.maximum(np.square(shape).sum(1), 1e-12), 0.0, 1.0)
        return limits, np.square(limits[:, None] * shape - rejected).sum(1)

    coarse = int(best(_RATES)[1].argmin())
    bracket = np.log([_RATES[max(coarse - 1, 0)], _RATES[min(coarse + 1, len(_RATES) - 1)]])
    solution = minimize_scalar(
        lambda log: float(best(np.exp([log]))[1][0]), bounds=tuple(bracket), method="bounded", options={"xatol": 1e-6}
    )
    rate = np.exp([solution.x])
    return AcceptanceMap(float(best(rate)[0][0]), float(rate[0] / mean), pinsker)
