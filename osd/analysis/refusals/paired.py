"""Exact tests for paired outcomes, and rates of outcomes that come in clusters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from scipy.stats import binom

_Z = statistics.NormalDist().inv_cdf(0.975)


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided p-value of McNemar's exact test, for the numbers of pairs that differ in one way and the other.

    McNemar, "Note on the sampling error of the difference between correlated proportions or percentages",
    Psychometrika 1947.
    """
    return min(1.0, 2 * tail(max(lost, gained), lost + gained))


def tail(successes: int, trials: int) -> float:
    """The probability of at least so many successes in ``trials`` tosses of a fair coin."""
    return float(binom.sf(successes - 1, trials, 0.5))


def holm(values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted so that the chance of any false alarm is at most what they say.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979.
    """
    order = sorted(range(len(values)), key=lambda place: values[place])
    steps = (min(1.0, (len(values) - rank) * values[place]) for rank, place in enumerate(order))
    adjusted = dict(zip(order, accumulate(steps, max), strict=True))
    return [adjusted[place] for place in range(len(values))]


@dataclass(frozen=True)
class Rate:
    """A share, and the ends of its 95 % interval."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, shares: Sequence[float], each: int) -> Rate:
        """The mean of the shares of clusters, each of them of ``each`` outcomes.

        The interval is Wilson's, of as many independent outcomes as would vary like the clusters do: at least one of a
        cluster, at most all of them.
        """
        share, clusters = statistics.fmean(shares), len(shares)
        variance = statistics.variance(shares) / clusters if clusters > 1 else 0.0
        outcomes = share * (1 - share) / variance if variance > 0 else 0.0
        n = min(max(outcomes, clusters), clusters * each)
        middle, width = share + _Z**2 / (2 * n), _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n * n))
        scale = 1 + _Z**2 / n
        return cls(share, max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale))
