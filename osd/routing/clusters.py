"""Online clustering of prompts by their embeddings, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from osd.routing.bandit import Arms, DrafterEvidence

CLUSTERS = 8
"""Most clusters."""

_PROMPT_MEMORY = 0.998  # factor of a prompt's weight at each later prompt
_SPREAD_MEMORY = 2000  # prompts over which the spread of each dimension is averaged


@dataclass(eq=False)
class Cluster:
    """Cluster of similar prompts, with the evidence of each domain's drafter on them.

    Attributes:
        center: mean embedding.
        prompts: discounted number of prompts.
        arms: evidence by domain.
        into: the cluster that has absorbed this one, None if none.
    """

    center: np.ndarray
    prompts: float = 1.0
    arms: Arms = field(default_factory=dict)
    into: Cluster | None = None

    def now(self) -> Cluster:
        """Return the cluster that contains this one after mergers, itself if there were none."""
        cluster = self
        while cluster.into is not None:
            cluster = cluster.into
        return cluster

    def absorb(self, cluster: Cluster) -> None:
        """Merge another cluster into this one."""
        both = self.prompts + cluster.prompts
        self.center += (cluster.center - self.center) * (cluster.prompts / both)
        self.prompts = both
        for domain, arm in cluster.arms.items():
            self.arms.setdefault(domain, DrafterEvidence()).add(arm)
        cluster.into = self


class Clusters:
    """Online k-means over all prompts so far, deterministic for a stream.

    Each prompt starts as a cluster. If there are too many, the two clusters merge whose union increases the sum of
    squared distances to the centres least (Ward, 1963). Prompts lose weight with later prompts, so old topics
    disappear. Distances are in units of each dimension's spread, because a few dimensions of hidden states are far
    larger than the rest.
    """

    def __init__(self, most: int = CLUSTERS) -> None:
        """Keep at most ``most`` clusters."""
        self.clusters: list[Cluster] = []
        self._most = most
        self._seen = 0.0
        self._mean = self._variance = np.zeros(0)

    def assign(self, embedding: np.ndarray) -> Cluster:
        """Add a prompt and return its cluster; ``embedding`` [dimensions] is finite."""
        x = np.asarray(embedding, np.float64)
        self._measure(x)
        for cluster in self.clusters:
            cluster.prompts *= _PROMPT_MEMORY
        cluster = Cluster(x.copy())
        self.clusters.append(cluster)
        if len(self.clusters) > self._most:
            older, younger = self._nearest()
            self.clusters[older].absorb(self.clusters.pop(younger))
        return cluster.now()

    def _measure(self, x: np.ndarray) -> None:
        if not self._seen:
            self._mean, self._variance = x.copy(), np.zeros_like(x)
        self._seen = min(self._seen + 1, _SPREAD_MEMORY)
        away = x - self._mean
        self._mean += away / self._seen
        self._variance += (away * (x - self._mean) - self._variance) / self._seen

    def _nearest(self) -> tuple[int, int]:
        """Return the indices of the two clusters to merge, the older first."""
        # A constant dimension gets no weight.
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
