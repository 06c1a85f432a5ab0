"""Prompts that are alike: online clustering of their embeddings in bounded space."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from osd.routing.bandit import Arm, Arms

CLUSTERS = 8
"""Clusters at most."""

_PROMPT_MEMORY = 0.998  # kept of a prompt's weight at each later one
_SPREAD_MEMORY = 2000  # prompts that the spread of each dimension is taken over


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
