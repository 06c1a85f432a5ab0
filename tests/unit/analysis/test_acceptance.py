from __future__ import annotations

import numpy as np
import pytest

from osd.analysis.scaling.law import AcceptanceMap, fit_acceptance

KL = np.geomspace(0.05, 6, 16)


@pytest.mark.parametrize("pinsker", [False, True])
def test_fit_recovers_the_acceptance_map(pinsker):
    true = AcceptanceMap(0.8, 0.6, pinsker)
    noise = np.random.default_rng(0).normal(0, 1e-3, len(KL))
    fitted = fit_acceptance(KL, true.acceptance(KL) + noise, pinsker=pinsker)
    assert (fitted.limit, fitted.rate) == pytest.approx((true.limit, true.rate), rel=0.02)


@pytest.mark.parametrize("limit", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("rate", [0.1, 1.0, 30.0])
def test_sampled_acceptance_respects_pinskers_bound(limit, rate):
    kl = np.geomspace(1e-6, 100, 200)
    acceptance = AcceptanceMap(limit, rate, pinsker=True).acceptance(kl)
    assert (acceptance >= 1 - np.sqrt(kl / 2) - 1e-12).all()
    assert ((acceptance >= 1 - limit - 1e-12) & (acceptance <= 1)).all()
    assert (np.diff(acceptance) <= 1e-12).all()


def test_zero_divergence_gives_full_acceptance():
    assert AcceptanceMap(0.9, 2.0, pinsker=True).acceptance([0.0, -0.1]).tolist() == [1.0, 1.0]
