"""Model of drafts: number of nodes and accepted length for each threshold of the acceptance probability."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import betaincinv

THRESHOLDS = np.array([1.1, 0.8, 0.6, 0.45, 0.33, 0.24, 0.17, 0.12, 0.08, 0.05, 0.03, 0.0])
"""Least probabilities of a draft token's path to be accepted. The first gives plain decoding, the last whole drafts."""

_SAMPLES = 512


class DraftCurve:
    """Drafts of a domain whose tokens have independent acceptance probabilities from a beta distribution.

    A draft is extended while the probability that its whole path is accepted is at least the threshold, as in
    ``osd.economy.plan``. Next to a token with acceptance probability c there is an alternative with the probability
    ``second c (1 - c)``, which has no children.

    Attributes:
        nodes: [thresholds], draft tokens per step.
        lengths: [thresholds], tokens per step, the bonus token included.
        surplus: [thresholds], tokens of an answer's last step beyond its end.
    """

    def __init__(self, acceptance: float, depth: int, certainty: float, second: float = 0.0) -> None:
        """Compute the curve.

        Args:
            acceptance: mean acceptance probability.
            depth: limit of tokens in a draft.
            certainty: a + b of the beta distribution.
            second: factor of the alternatives' probability, 0 for no alternatives.
        """
        # All means use the same strata, so that a better drafter is better at every threshold.
        strata = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
        draws = np.random.default_rng(0).permuted(np.tile(strata, (depth, 1)), axis=1).T  # [samples, depth]
        mean = min(max(acceptance, 1e-6), 1 - 1e-6)
        chances = betaincinv(certainty * mean, certainty * (1 - mean), draws)
        paths = np.cumprod(chances, 1)  # [samples, depth]
        if second:
            paths = np.stack([paths, paths * second * (1 - chances)], 1).reshape(len(chances), -1)
        drafted = paths[None] >= THRESHOLDS[:, None, None]
        self.nodes = drafted.sum(2).mean(1)
        kept = (paths[None] * drafted).sum(2)
        self.lengths = 1 + kept.mean(1)
        # Renewal theory: for X tokens per step, (E[X^2] / E[X] - 1) / 2 tokens are beyond an independent end.
        places = np.tile(np.arange(1, depth + 1), 2 if second else 1)
        squares = 1 + ((2 * places + 1) * (paths[None] * drafted)).sum(2).mean(1)  # E[(1 + n)^2] of n tokens kept
        self.surplus = np.maximum(squares / self.lengths - 1, 0.0) / 2


@lru_cache(maxsize=4096)
def draft_curve(hundredths: int, depth: int, certainty: float, second: float = 0.0) -> DraftCurve:
    """Return the cached curve of an acceptance probability in hundredths."""
    return DraftCurve(hundredths / 100, depth, certainty, second)


def uniform_acceptance(length: float, depth: int) -> float:
    """Return the acceptance probability, equal at each of ``depth`` places, of chains with this expected length."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_length(middle, depth) < length else (low, middle)
    return (low + high) / 2


def chain_length(acceptance: float, depth: int) -> float:
    """Return the tokens per step of chains, bonus token included; each of ``depth`` places has the same acceptance."""
    length = 1.0
    for _ in range(depth):
        length = 1 + acceptance * length
    return length
