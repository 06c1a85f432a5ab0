"""Router of prompts to the drafter that is fastest for similar prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from osd.routing.bandit import Bandit
from osd.routing.clusters import Cluster, Clusters

_FEWEST_TOKENS = 8  # least tokens of a completion whose speed is counted
_DTYPE = np.dtype("<f2")


@dataclass(frozen=True)
class Pick:
    """Decision of the router for one prompt.

    The two domains differ while a drafter is tried that is not clearly the fastest.

    Attributes:
        embedding: [dimensions] of the prompt.
        cluster: of the prompt.
        drafter: domain whose drafter serves the request.
        domain: domain that the request is attributed to.
    """

    embedding: np.ndarray
    cluster: Cluster
    drafter: str
    domain: str


class Outcome(msgspec.Struct, frozen=True):
    """Gain of one request, shared with other replicas so that they need fewer trials of the drafter on similar prompts.

    Attributes:
        request_id: for a later deletion.
        tenant: of the request.
        drafter: domain of the drafter.
        gain: log tokens per second above the level of its replica.
        embedding: of the prompt, in half precision.
    """

    request_id: str
    tenant: str
    drafter: str
    gain: float
    embedding: bytes

    @classmethod
    def of(cls, request_id: str, tenant: str, drafter: str, gain: float, states: np.ndarray) -> Self:
        """Return the outcome for a prompt with the embedding ``states`` [dimensions], rounded to half precision."""
        most = np.finfo(_DTYPE).max
        return cls(request_id, tenant, drafter, gain, states.clip(-most, most).astype(_DTYPE).tobytes())

    def states(self) -> np.ndarray:
        """Return the embedding [dimensions]."""
        return np.frombuffer(self.embedding, _DTYPE).astype(np.float32)


class Router:
    """Router that picks the domain with the fastest drafter for similar prompts, and sometimes tries other domains.

    Memory is bounded by ``CLUSTERS`` times the number of domains.
    """

    def __init__(self, fallback: str) -> None:
        """Start without evidence; ``fallback`` is the domain of a request while no other is known to be faster."""
        self._fallback = fallback
        self.clusters = Clusters()
        self.bandit = Bandit()

    def pick(self, embedding: np.ndarray, domains: Sequence[str]) -> Pick:
        """Return which of one or more ``domains`` serves a prompt with this embedding [dimensions]."""
        cluster, bandit = self.clusters.assign(embedding), self.bandit
        bandit.keep_only(domains, [existing.arms for existing in self.clusters.clusters])
        order = sorted(domains, key=lambda domain: (domain != self._fallback, domain))
        fastest = max(order, key=lambda domain: bandit.bounds(cluster.arms, domain)[1])
        # The owner's drafter learns from the request, so an uncertain advantage does not change the owner.
        usual = bandit.bounds(cluster.arms, self._fallback)[1]
        clear = [domain for domain in order if bandit.bounds(cluster.arms, domain)[0] > usual]
        owner = max(clear, key=lambda domain: bandit.expected(cluster.arms, domain), default=self._fallback)
        return Pick(embedding, cluster, fastest, owner)

    def learn(self, pick: Pick, tokens: int, seconds: float) -> float | None:
        """Add the speed of a request, decoded to ``tokens`` in ``seconds``; a request that is too short is ignored.

        Returns:
            The gain of its drafter in log tokens per second, for ``hear`` of other replicas' routers; None if ignored.
        """
        if tokens < _FEWEST_TOKENS or seconds <= 0:
            return None
        return self.bandit.learn(pick.cluster.now().arms, pick.drafter, math.log(tokens / seconds))

    def hear(self, embedding: np.ndarray, drafter: str, gain: float) -> None:
        """Add the gain that another replica measured for a prompt with this embedding [dimensions]."""
        self.bandit.hear(self.clusters.assign(embedding).arms, drafter, gain)
