"""Assumed drafts: their nodes and lengths where only tokens above some chance are drafted."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import betaincinv

THRESHOLDS = np.array([1.1, 0.8, 0.6, 0.45, 0.33, 0.24, 0.17, 0.12, 0.08, 0.05, 0.03, 0.0])
"""Chances of a drafted token's path that a draft asks for: the first is plain decoding, the last drafts everything."""

_SAMPLES = 512


class DraftCurve:
    """Drafts of a domain whose tokens are accepted with chances of a beta distribution, each independent of the others.

    A draft goes on while the chance that its whole path is accepted is at least the threshold, as
    ``osd.economy.plan`` asks for. Everything is [thresholds].

    Beside a token that is accepted with a chance c another one stands that is with ``second c (1 - c)``, and is drafted
    where its path asks for it; nothing is drafted behind it.

    Attributes:
        nodes: tokens drafted in a round.
        lengths: tokens that a round gives, the bonus token included.
        surplus: tokens of an answer's last round that are beyond its end.
    """

    def __init__(self, acceptance: float, depth: int, certainty: float, second: float = 0.0) -> None:
        """Of chances with this mean, in drafts of up to ``depth`` tokens; ``certainty`` is a + b of a beta."""
        # The same strata for every mean, so that a better drafter is better for every threshold.
        strata = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
        draws = np.random.default_rng(0).permuted(np.tile(strata, (depth, 1)), axis=1).T  # [samples, depth]
        mean = min(max(acceptance, 1e-6), 1 - 1e-6)
        chances = betaincinv(certainty * mean, certainty * (1 - mean), draws)
        paths = np.cumprod(chances, 1)  # [samples, depth]
        if second:  # which ends at the same depth
            paths = np.stack([paths, paths * second * (1 - chances)], 1).reshape(len(chances), -1)
        drafted = paths[None] >= THRESHOLDS[:, None, None]
        self.nodes = drafted.sum(2).mean(1)
        kept = (paths[None] * drafted).sum(2)
        self.lengths = 1 + kept.mean(1)
        # Of a round's tokens X, renewal theory leaves (E[X^2] / E[X] - 1) / 2 beyond an end that knows nothing of them.
        places = np.tile(np.arange(1, depth + 1), 2 if second else 1)
        squares = 1 + ((2 * places + 1) * (paths[None] * drafted)).sum(2).mean(1)  # E[(1 + n)^2] of n tokens kept
        self.surplus = np.maximum(squares / self.lengths - 1, 0.0) / 2


@lru_cache(maxsize=4096)
def draft_curve(hundredths: int, depth: int, certainty: float, second: float = 0.0) -> DraftCurve:
    """The one of an acceptance in hundredths."""
    return DraftCurve(hundredths / 100, depth, certainty, second)


def alike(length: float, depth: int) -> float:
    """Return the acceptance, the same at each of ``depth`` places, that gives chains of this expected length."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_length(middle, depth) < length else (low, middle)
    return (low + high) / 2


def chain_length(acceptance: float, depth: int) -> float:
    """Return tokens per step, the bonus token included, of chains accepted alike at each of ``depth`` places."""
    length = 1.0
    for _ in range(depth):
        length = 1 + acceptance * length
    return length
