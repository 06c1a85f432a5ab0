from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from osd.analysis.refusals.paired import Rate, holm, mcnemar, tail


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 9), (5, 5), (12, 3), (3, 12), (40, 71), (1100, 1000)])
def test_mcnemar_matches_scipys_binomial_test(lost: int, gained: int):
    reference = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(reference, rel=1e-9)
    one_sided = binomtest(lost, lost + gained, alternative="greater").pvalue if lost + gained else 1.0
    assert tail(lost, lost + gained) == pytest.approx(one_sided, rel=1e-9)


def test_holm_matches_statsmodels():
    # statsmodels.stats.multitest.multipletests(..., method="holm")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("hits", "count"), [(0, 20), (3, 20), (10, 20), (20, 20), (1, 1)])
def test_interval_of_independent_outcomes_matches_wilson(hits: int, count: int):
    rate = Rate.of([float(number < hits) for number in range(count)], 1)
    interval = binomtest(hits, count).proportion_ci(method="wilson")
    assert (rate.share, rate.low, rate.high) == pytest.approx((hits / count, interval.low, interval.high))


def test_repeated_outcomes_do_not_narrow_the_interval():
    once = Rate.of([1.0, 0.0, 0.0, 1.0] * 10, 1)
    repeated = Rate.of([1.0, 0.0, 0.0, 1.0] * 10, 50)
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high), abs=0.01)
    drawn = (binom.ppf((np.arange(40) + 0.5) / 40, 50, 0.5) / 50).tolist()  # quantiles of shares of 50 tosses
    assert Rate.of(drawn, 50).high - Rate.of(drawn, 50).low < 0.3 * (once.high - once.low)
    assert Rate.of([1.0] * 40, 50).low == pytest.approx(Rate.of([1.0] * 40, 1).low)
