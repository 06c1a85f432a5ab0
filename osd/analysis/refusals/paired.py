"""Exact tests for paired outcomes, and rates of clustered outcomes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from scipy.stats import binom

_Z = statistics.NormalDist().inv_cdf(0.975)


def mcnemar(lost: int, gained: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, given the numbers of pairs that differ in each direction.

    McNemar, "Note on the sampling error of the difference between correlated proportions or percentages",
    Psychometrika 1947.
    """
    return min(1.0, 2 * tail(max(lost, gained), lost + gained))


def tail(successes: int, trials: int) -> float:
    """Return the probability of at least ``successes`` successes in ``trials`` tosses of a fair coin."""
    return float(binom.sf(successes - 1, trials, 0.5))


def holm(values: Sequence[float]) -> list[float]:
    """Return the adjusted p-values of several tests, which bound the probability of any false alarm.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979.
    """
    order = sorted(range(len(values)), key=lambda place: values[place])
    steps = (min(1.0, (len(values) - rank) * values[place]) for rank, place in enumerate(order))
    adjusted = dict(zip(order, accumulate(steps, max), strict=True))
    return [adjusted[place] for place in range(len(values))]


@dataclass(frozen=True)
class Rate:
    """Share with the ends of its 95 % interval."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, shares: Sequence[float], each: int) -> Rate:
        """Return the mean share of clusters, each with ``each`` outcomes.

        The interval is Wilson's interval for the effective number of independent outcomes, which follows from the
        variance between clusters. It lies between the number of clusters and the number of outcomes.
        """
        share, clusters = statistics.fmean(shares), len(shares)
        variance = statistics.variance(shares) / clusters if clusters > 1 else 0.0
        outcomes = share * (1 - share) / variance if variance > 0 else 0.0
        n = min(max(outcomes, clusters), clusters * each)
        middle, width = share + _Z**2 / (2 * n), _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n * n))
        scale = 1 + _Z**2 / n
        return cls(share, max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale))
