"""Which domain's drafter serves a request that does not say: learned online from prompts and measured speed.

Prompts with similar embeddings form a cluster, and each cluster has a bandit over the domains whose drafters are at
hand. Whatever is chosen, the output is the target's: a wrong choice costs speed and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

CLUSTERS = 8
"""Clusters at most."""

_PROMPT_MEMORY = 0.998  # kept of a prompt's weight at each later one
_SPREAD_MEMORY = 2000  # prompts that the spread of each dimension is taken over
_DISCOUNT = 0.99  # kept of a cluster's evidence at each request of it
_EXPLORATION = 0.6  # Garivier and Moulines' choice for discounted UCB
_SHARED = 1.0  # requests that what a domain does elsewhere counts for in a cluster
_LEVEL_STEP = 0.05  # of a surprise that is put down to the load, which all domains share
_NOISE_STEP = 0.02
_FLOOR = 0.04
_FEWEST_TOKENS = 8  # of a completion whose speed says something


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


@dataclass(eq=False)
class Cluster:
    """Prompts that are alike: their centre, how many they were, and how each domain's drafter did on them."""

    center: np.ndarray
    prompts: float = 1.0
    arms: Arms = field(default_factory=dict)
    into: Cluster | None = None

    def now(self) -> Cluster:
        """The cluster that this one has become a part of, itself if none."""
        cluster = self
        while cluster.into is not None:
            cluster = cluster.into
        return cluster

    def absorb(self, other: Cluster) -> None:
        """Become one cluster with another."""
        both = self.prompts + other.prompts
        self.center += (other.center - self.center) * (other.prompts / both)
        self.prompts = both
        for domain, arm in other.arms.items():
            self.arms.setdefault(domain, Arm()).add(arm)
        other.into = self


class Clusters:
    """Online k-means, a clustering of the prompts so far in bounded space: the same stream gives the same clusters.

    Each prompt is a cluster at first. When there are too many, those two become one whose union raises the sum of
    squared distances to the centres least (Ward, 1963). Prompts lose weight as others come, so that topics that are
    gone give way. Distances are measured in units of each dimension's own spread: a few dimensions of hidden states
    are far larger than all others.
    """

    def __init__(self, most: int = CLUSTERS) -> None:
        """Keep at most ``most`` clusters."""
        self.clusters: list[Cluster] = []
        self._most = most
        self._seen = 0.0
        self._mean = self._variance = np.zeros(0)

    def assign(self, embedding: np.ndarray) -> Cluster:
        """The cluster of a prompt, which learns from it; ``embedding`` [dimensions] is finite."""
        x = np.asarray(embedding, np.float64)
        self._measure(x)
        for cluster in self.clusters:
            cluster.prompts *= _PROMPT_MEMORY
        mine = Cluster(x.copy())
        self.clusters.append(mine)
        if len(self.clusters) > self._most:
            older, younger = self._nearest()
            self.clusters[older].absorb(self.clusters.pop(younger))
        return mine.now()

    def _measure(self, x: np.ndarray) -> None:
        if not self._seen:
            self._mean, self._variance = x.copy(), np.zeros_like(x)
        self._seen = min(self._seen + 1, _SPREAD_MEMORY)
        away = x - self._mean
        self._mean += away / self._seen
        self._variance += (away * (x - self._mean) - self._variance) / self._seen

    def _nearest(self) -> tuple[int, int]:
        """The two clusters that are best made one, the older one first."""
        # A dimension that never changes says nothing.
        weight = np.divide(1.0, self._variance, out=np.zeros_like(self._variance), where=self._variance > 0)
        centers = np.stack([cluster.center for cluster in self.clusters]) - self._mean
        scaled = centers * np.sqrt(weight)
        norms = (scaled**2).sum(-1)
        squared = norms[:, None] + norms - 2 * scaled @ scaled.T
        prompts = np.array([cluster.prompts for cluster in self.clusters])
        cost = squared * prompts[:, None] * prompts / (prompts[:, None] + prompts)
        cost[np.tril_indices(len(cost))] = np.inf
        older, younger = np.unravel_index(int(cost.argmin()), cost.shape)
        return int(older), int(younger)


@dataclass(frozen=True)
class Pick:
    """What the router decided: the drafter of ``line`` serves, and ``domain`` is whose request it seems to be.

    They differ where a drafter is tried that is not clearly the best one.
    """

    cluster: Cluster
    line: str
    domain: str


class Router:
    """Picks the line of drafters for each prompt by what is fastest for prompts like it, and tries the others at times.

    Log tokens per second are taken apart into a level, which follows the load of the machine, and what a domain's
    drafter adds to it in a cluster. Discounted UCB (Garivier and Moulines, 2011) picks by the latter: no randomness,
    and a drafter that is swapped for a better one is found out. What a domain does in all clusters is the first guess
    in each. All of it is bounded by ``CLUSTERS`` times the domains at hand.
    """

    def __init__(self, fallback: str) -> None:
        """Know nothing; ``fallback`` is the domain of a request as long as nothing else is known to be faster."""
        self._fallback = fallback
        self._clusters = Clusters()
        self._everywhere: Arms = {}
        self._level: float | None = None
        self._noise = 0.25  # variance of one request's log speed, before any was seen

    def pick(self, embedding: np.ndarray, lines: Sequence[str]) -> Pick:
        """Decide which of ``lines``, the domains whose drafters are at hand, serves a prompt.

        Args:
            embedding: [dimensions] of the prompt, finite.
            lines: one or more, in any order.
        """
        cluster = self._clusters.assign(embedding)
        self._forget_others(lines)
        order = sorted(lines, key=lambda line: (line != self._fallback, line))
        line = max(order, key=lambda line: self._bounds(cluster, line)[1])
        # Whose request it is decides who learns from it: an advantage that may be chance makes it nobody else's.
        usual = self._bounds(cluster, self._fallback)[1]
        clear = [line for line in order if self._bounds(cluster, line)[0] > usual]
        domain = max(clear, key=lambda line: self._expected(cluster, line), default=self._fallback)
        return Pick(cluster, line, domain)

    def learn(self, pick: Pick, tokens: int, seconds: float) -> None:
        """Take in how fast a request was decoded: ``tokens`` in ``seconds``; too short a one says nothing."""
        if tokens < _FEWEST_TOKENS or seconds <= 0:
            return
        speed = math.log(tokens / seconds)
        if self._level is None:
            self._level = speed
        cluster = pick.cluster.now()
        gain = speed - self._level
        if pick.line in self._everywhere:
            surprise = gain - self._expected(cluster, pick.line)
            self._level += _LEVEL_STEP * surprise
            self._noise += _NOISE_STEP * (surprise**2 - self._noise)
        for arms in (cluster.arms, self._everywhere):
            for arm in arms.values():
                arm.fade()
            arms.setdefault(pick.line, Arm()).add(Arm(1.0, gain))

    def _expected(self, cluster: Cluster, line: str) -> float:
        """What a drafter adds to the level in a cluster."""
        arm, shared = cluster.arms.get(line, Arm()), self._shared(line)
        return (arm.total + shared * self._everywhere[line].mean) / (arm.weight + shared)

    def _bounds(self, cluster: Cluster, line: str) -> tuple[float, float]:
        """Between what and what it may well add; evidence fades, so that what was not tried for long may add a lot."""
        if line not in self._everywhere:
            return -math.inf, math.inf
        evidence = sum(arm.weight for arm in cluster.arms.values()) + _SHARED
        weight = cluster.arms.get(line, Arm()).weight + self._shared(line)
        width = math.sqrt(_EXPLORATION * max(self._noise, _FLOOR) * math.log(1 + evidence) / weight)
        expected = self._expected(cluster, line)
        return expected - width, expected + width

    def _shared(self, line: str) -> float:
        return min(_SHARED, self._everywhere[line].weight)

    def _forget_others(self, lines: Sequence[str]) -> None:
        """Keep no evidence about drafters that are gone."""
        if self._everywhere.keys() <= set(lines):
            return
        for arms in (self._everywhere, *(cluster.arms for cluster in self._clusters.clusters)):
            for line in arms.keys() - set(lines):
                del arms[line]
