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
_FLOORS = (0.0, 0.7)  # of the least loss
_SHARES = (0.3, 0.7)  # of what is above the floor, that is the parameters'
"""Where the search begins: every combination."""

_STEEPEST = 4.0
_LEAST_LOG = -25.0
"""Of a term's logarithm: below it the term is nothing."""


_RATES = np.geomspace(1e-3, 1e2, 61)
"""Of the map, times the mean divergence: where the search begins."""


@dataclass(frozen=True)
class Law:
    """E + A N^-a + B D^-b: ``floor`` E, and a factor and an exponent for the parameters N and for the tokens D."""

    floor: float
    size_factor: float
    size_exponent: float
    data_factor: float
    data_exponent: float

    def loss(self, parameters: ArrayLike, tokens: ArrayLike) -> Floats:
        """L for each pair, in the unit of the losses that it was fitted to."""
        n, d = np.asarray(parameters, float), np.asarray(tokens, float)
        return self.floor + self.size_factor * n**-self.size_exponent + self.data_factor * d**-self.data_exponent


@dataclass(frozen=True)
class Fit:
    """A law, whether its exponents are ``tied``, and the losses' root mean square distance from it.

    ``criterion`` is Akaike's, corrected for few points: the law with the lower one is expected to predict better.
    """

    law: Law
    tied: bool
    error: float
    criterion: float


def constants(tied: bool) -> int:
    """How many a law has."""
    return 4 if tied else 5


def fit(parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, *, tied: bool, start: Law | None = None) -> Fit:
    """The law with the least sum of squared distances from ``losses``.

    The floor is not below 0, no exponent below 0 or above 4.

    Args:
        parameters: N of each point.
        tokens: D of each point.
        losses: L of each point.
        tied: one exponent for both.
        start: where the search begins, else on a grid.
    """
    n, d, measured = (np.asarray(values, float) for values in (parameters, tokens, losses))
    # About the middle of the points a term's factor is its share of the loss, whatever the exponent.
    middle = np.array([np.log(n).mean(), np.log(d).mean()])
    logs = np.stack([np.log(n), np.log(d)], 1) - middle  # [points, 2]
    lower, upper = [0.0, _LEAST_LOG, _LEAST_LOG, 0.0], [max(measured.min(), 1e-9), 25.0, 25.0, _STEEPEST]
    if not tied:
        lower, upper = [*lower, 0.0], [*upper, _STEEPEST]

    def terms(values: Floats) -> Floats:
        """[points, 2] what the parameters and the tokens add to the floor."""
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
    found = [
        least_squares(
            distances,
            np.clip(values, lower, upper),
            jac=slopes,  # type: ignore[arg-type] # scipy takes a function; only its default is a string
            bounds=(lower, upper),
            x_scale="jac",
        )
        for values in starts
    ]
    best = min(found, key=lambda one: float(one.cost)).x
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
    """Of a least-squares fit whose mean squared distance is ``square``."""
    rest = points - free - 1
    penalty = 2 * free * (1 + (free + 1) / rest) if rest > 0 else math.inf
    return points * math.log(max(square, 1e-300)) + penalty


@dataclass(frozen=True)
class AcceptanceMap:
    """Rejected share = ``limit`` (1 - exp(-``rate`` KL)): nothing at KL 0, ``limit`` where the drafter knows nothing.

    With ``pinsker`` it is that of tokens drawn at temperature 1, the total variation, which is sqrt(KL / 2) at most.
    """

    limit: float
    rate: float
    pinsker: bool

    def acceptance(self, divergence: ArrayLike) -> Floats:
        """Share accepted at each forward KL, in nats a token; one below 0 counts as 0."""
        above = np.maximum(np.asarray(divergence, float), 0.0)
        rejected = self.limit * -np.expm1(-self.rate * above)
        return 1 - (np.minimum(rejected, np.sqrt(above / 2)) if self.pinsker else rejected)


def fit_acceptance(divergences: ArrayLike, accepted: ArrayLike, *, pinsker: bool) -> AcceptanceMap:
    """The map with the least sum of squared distances from the shares ``accepted`` at ``divergences``.

    Shares that keep to Pinsker's bound are fitted as if there were none.
    """
    kl, rejected = np.asarray(divergences, float), 1 - np.asarray(accepted, float)
    mean = max(float(kl.mean()), 1e-9)

    def best(rates: Floats) -> tuple[Floats, Floats]:
        """The best limit for each of ``rates`` [r], and the sum of squared distances that it leaves."""
        shape = -np.expm1(-rates[:, None] / mean * kl)  # [r, points]
        limits = np.clip(shape @ rejected / np.maximum(np.square(shape).sum(1), 1e-12), 0.0, 1.0)
        return limits, np.square(limits[:, None] * shape - rejected).sum(1)

    coarse = int(best(_RATES)[1].argmin())
    bracket = np.log([_RATES[max(coarse - 1, 0)], _RATES[min(coarse + 1, len(_RATES) - 1)]])
    found = minimize_scalar(
        lambda log: float(best(np.exp([log]))[1][0]), bounds=tuple(bracket), method="bounded", options={"xatol": 1e-6}
    )
    rate = np.exp([found.x])
    return AcceptanceMap(float(best(rate)[0][0]), float(rate[0] / mean), pinsker)
