"""Discounted UCB bandit over domains' drafters, with measured speeds in one cluster of prompts and in all clusters."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

_DISCOUNT = 0.99  # factor of a cluster's evidence at each of its requests
_EXPLORATION = 0.6  # Garivier and Moulines' choice for discounted UCB
_SHARED = 1.0  # weight, in requests, of a domain's evidence in all clusters
_LEVEL_STEP = 0.05  # share of a surprise that is attributed to the load, common to all domains
_NOISE_STEP = 0.02
_FLOOR = 0.04


@dataclass
class DrafterEvidence:
    """Evidence of one domain's drafter: the discounted number and the discounted sum of its requests' gains.

    A gain is the logarithm of the tokens per second minus the level that all drafters share; see ``Bandit``.

    Attributes:
        weight: discounted number of requests.
        total: discounted sum of their gains.
    """

    weight: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """Discounted mean of the gains, 0 without evidence."""
        return self.total / self.weight if self.weight else 0.0

    def fade(self) -> None:
        """Discount the evidence so far."""
        self.weight *= _DISCOUNT
        self.total *= _DISCOUNT

    def add(self, evidence: DrafterEvidence) -> None:
        """Add further evidence of the same drafter."""
        self.weight += evidence.weight
        self.total += evidence.total


Arms = dict[str, DrafterEvidence]
"""Evidence of each domain's drafter, by domain, from the prompts of one cluster or of all clusters."""


class Bandit:
    """Estimates and bounds of the speed of each domain's drafter in a cluster of similar prompts.

    The natural logarithm of a request's tokens per second is the sum of a level and a *gain*. The level is common to
    all drafters and follows the load of the machine. The gain depends on the drafter and the cluster; the gain over all
    clusters is the prior of each cluster. Discounted UCB (Garivier and Moulines, 2011) bounds the gain: it needs no
    randomness, and it notices when a drafter is replaced by a better one.
    """

    def __init__(self) -> None:
        self.everywhere: Arms = {}
        self._level: float | None = None
        self._noise = 0.25  # initial variance of one request's log speed

    def learn(self, arms: Arms, domain: str, speed: float) -> float:
        """Add the measured speed of a finished request, and return the request's gain.

        Args:
            arms: evidence of the cluster of the request's prompt, to be updated.
            domain: the domain whose drafter served the request.
            speed: natural logarithm of the request's tokens per second.

        Returns:
            ``speed`` minus the level before this request, for ``hear`` in other replicas; 0 for the first request.
        """
        if self._level is None:
            self._level = speed
        gain = speed - self._level
        if domain in self.everywhere:
            self._level += _LEVEL_STEP * (gain - self.expected(arms, domain))
        self.hear(arms, domain, gain)
        return gain

    def hear(self, arms: Arms, domain: str, gain: float) -> None:
        """Add the gain of a request whose prompt is in the cluster with ``arms``, from this or another replica.

        Each replica subtracts its own level, because its load differs.
        """
        if domain in self.everywhere:
            surprise = gain - self.expected(arms, domain)
            self._noise += _NOISE_STEP * (surprise**2 - self._noise)
        for evidence in (arms, self.everywhere):
            for arm in evidence.values():
                arm.fade()
            evidence.setdefault(domain, DrafterEvidence()).add(DrafterEvidence(1.0, gain))

    def expected(self, arms: Arms, domain: str) -> float:
        """Return the expected gain of the drafter of ``domain``, which must be known, in a cluster."""
        arm, shared = arms.get(domain, DrafterEvidence()), self._shared(domain)
        return (arm.total + shared * self.everywhere[domain].mean) / (arm.weight + shared)

    def bounds(self, arms: Arms, domain: str) -> tuple[float, float]:
        """Return lower and upper bound of the gain; they widen while a drafter is unused, as its evidence fades."""
        if domain not in self.everywhere:
            return -math.inf, math.inf
        evidence = sum(arm.weight for arm in arms.values()) + _SHARED
        weight = arms.get(domain, DrafterEvidence()).weight + self._shared(domain)
        width = math.sqrt(_EXPLORATION * max(self._noise, _FLOOR) * math.log(1 + evidence) / weight)
        expected = self.expected(arms, domain)
        return expected - width, expected + width

    def keep_only(self, domains: Collection[str], clusters: Collection[Arms]) -> None:
        """Remove the evidence of all domains but ``domains``, here and in the arms of every cluster."""
        if self.everywhere.keys() <= set(domains):
            return
        for arms in (self.everywhere, *clusters):
            for domain in arms.keys() - set(domains):
                del arms[domain]

    def _shared(self, domain: str) -> float:
        return min(_SHARED, self.everywhere[domain].weight)
