"""How much faster each domain's drafter is, in one cluster and in all: discounted UCB over measured speeds."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

_DISCOUNT = 0.99  # kept of a cluster's evidence at each request of it
_EXPLORATION = 0.6  # Garivier and Moulines' choice for discounted UCB
_SHARED = 1.0  # requests that what a domain does elsewhere counts for in a cluster
_LEVEL_STEP = 0.05  # of a surprise that is put down to the load, which all domains share
_NOISE_STEP = 0.02
_FLOOR = 0.04


@dataclass
class Arm:
    """How fast one domain's drafter was: a discounted mean of log tokens per second above the level of the time."""

    weight: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """0 without evidence."""
        return self.total / self.weight if self.weight else 0.0

    def fade(self) -> None:
        """Let what comes next count more than what there is."""
        self.weight *= _DISCOUNT
        self.total *= _DISCOUNT

    def add(self, other: Arm) -> None:
        """Take in the evidence of another."""
        self.weight += other.weight
        self.total += other.total


Arms = dict[str, Arm]
"""What is known of each domain's drafter."""


class Bandit:
    """Estimates what each domain's drafter adds to the speed of decoding in a cluster, and how sure that is.

    Log tokens per second are taken apart into a level, which follows the load of the machine, and what a drafter adds
    to it. Discounted UCB (Garivier and Moulines, 2011) bounds the latter: no randomness, and a drafter that is swapped
    for a better one is found out. What a drafter does in all clusters is the first guess in each.
    """

    def __init__(self) -> None:
        self.everywhere: Arms = {}
        self._level: float | None = None
        self._noise = 0.25  # variance of one request's log speed, before any was seen

    def learn(self, arms: Arms, domain: str, speed: float) -> float:
        """Take in the log tokens per second of a request of the cluster that has ``arms``; returns the gain."""
        if self._level is None:
            self._level = speed
        gain = speed - self._level
        if domain in self.everywhere:
            self._level += _LEVEL_STEP * (gain - self.expected(arms, domain))
        self.hear(arms, domain, gain)
        return gain

    def hear(self, arms: Arms, domain: str, gain: float) -> None:
        """Take in how far a request of the cluster that has ``arms`` was above the level, here or in another replica.

        Each has a level of its own: its load is not that of others.
        """
        if domain in self.everywhere:
            surprise = gain - self.expected(arms, domain)
            self._noise += _NOISE_STEP * (surprise**2 - self._noise)
        for known in (arms, self.everywhere):
            for arm in known.values():
                arm.fade()
            known.setdefault(domain, Arm()).add(Arm(1.0, gain))

    def expected(self, arms: Arms, domain: str) -> float:
        """What the drafter of ``domain``, of which something is known, adds to the level in a cluster."""
        arm, shared = arms.get(domain, Arm()), self._shared(domain)
        return (arm.total + shared * self.everywhere[domain].mean) / (arm.weight + shared)

    def bounds(self, arms: Arms, domain: str) -> tuple[float, float]:
        """Between what and what it may well add; evidence fades, so that what was not tried for long may add a lot."""
        if domain not in self.everywhere:
            return -math.inf, math.inf
        evidence = sum(arm.weight for arm in arms.values()) + _SHARED
        weight = arms.get(domain, Arm()).weight + self._shared(domain)
        width = math.sqrt(_EXPLORATION * max(self._noise, _FLOOR) * math.log(1 + evidence) / weight)
        expected = self.expected(arms, domain)
        return expected - width, expected + width

    def forget_others(self, domains: Collection[str], clusters: Collection[Arms]) -> None:
        """Keep evidence about the drafters of ``domains`` alone, here and in the arms of every cluster."""
        if self.everywhere.keys() <= set(domains):
            return
        for arms in (self.everywhere, *clusters):
            for domain in arms.keys() - set(domains):
                del arms[domain]

    def _shared(self, domain: str) -> float:
        return min(_SHARED, self.everywhere[domain].weight)
