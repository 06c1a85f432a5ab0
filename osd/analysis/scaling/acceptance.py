"""How much is accepted at a divergence from the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from osd.analysis.scaling.law import Floats

_RATES = np.geomspace(1e-3, 1e2, 61)
"""Of the map, times the mean divergence: where the search begins."""


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
