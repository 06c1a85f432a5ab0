"""Sends each prompt to the drafter that is fastest for prompts like it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from osd.routing.bandit import Bandit
from osd.routing.clusters import Cluster, Clusters

_FEWEST_TOKENS = 8  # of a completion whose speed says something
_DTYPE = np.dtype("<f2")


@dataclass(frozen=True)
class Pick:
    """What the router decided: the drafter of ``drafter`` serves, and ``domain`` is whose request it seems to be.

    They differ where a drafter is tried that is not clearly the best one. ``embedding`` [dimensions] is the prompt's.
    """

    embedding: np.ndarray
    cluster: Cluster
    drafter: str
    domain: str


class Outcome(msgspec.Struct, frozen=True):
    """What a replica tells the others of one request, so that they need not try its drafter on such prompts too.

    ``gain`` is how far the ``drafter`` of a domain was above the level of its replica, in log tokens per second.
    ``request_id`` is there so that it can be forgotten.
    """

    request_id: str
    tenant: str
    drafter: str
    gain: float
    embedding: bytes

    @classmethod
    def of(cls, request_id: str, tenant: str, drafter: str, gain: float, states: np.ndarray) -> Self:
        """The outcome on a prompt whose embedding is ``states`` [dimensions], which is kept in half precision."""
        most = np.finfo(_DTYPE).max
        return cls(request_id, tenant, drafter, gain, states.clip(-most, most).astype(_DTYPE).tobytes())

    def states(self) -> np.ndarray:
        """The embedding [dimensions]."""
        return np.frombuffer(self.embedding, _DTYPE).astype(np.float32)


class Router:
    """Picks the domain whose drafter serves a prompt by what is fastest for prompts like it, and tries others at times.

    Memory is bounded by ``CLUSTERS`` times the domains at hand.
    """

    def __init__(self, fallback: str) -> None:
        """Know nothing; ``fallback`` is the domain of a request as long as nothing else is known to be faster."""
        self._fallback = fallback
        self.clusters = Clusters()
        self.bandit = Bandit()

    def pick(self, embedding: np.ndarray, domains: Sequence[str]) -> Pick:
        """Decide which of one or more ``domains`` at hand serves a prompt, by its embedding [dimensions]."""
        cluster, bandit = self.clusters.assign(embedding), self.bandit
        bandit.forget_others(domains, [other.arms for other in self.clusters.clusters])
        order = sorted(domains, key=lambda domain: (domain != self._fallback, domain))
        fastest = max(order, key=lambda domain: bandit.bounds(cluster.arms, domain)[1])
        # Whose request it is decides who learns from it: an advantage that may be chance makes it nobody else's.
        usual = bandit.bounds(cluster.arms, self._fallback)[1]
        clear = [domain for domain in order if bandit.bounds(cluster.arms, domain)[0] > usual]
        owner = max(clear, key=lambda domain: bandit.expected(cluster.arms, domain), default=self._fallback)
        return Pick(embedding, cluster, fastest, owner)

    def learn(self, pick: Pick, tokens: int, seconds: float) -> float | None:
        """Take in how fast a request was decoded: ``tokens`` in ``seconds``; too short a one says nothing.

        Returns what its drafter added to the log speed of this time, for ``hear`` of other replicas' routers.
        """
        if tokens < _FEWEST_TOKENS or seconds <= 0:
            return None
        return self.bandit.learn(pick.cluster.now().arms, pick.drafter, math.log(tokens / seconds))

    def hear(self, embedding: np.ndarray, drafter: str, gain: float) -> None:
        """Take in what another replica learnt of a prompt with that embedding [dimensions]."""
        self.bandit.hear(self.clusters.assign(embedding).arms, drafter, gain)
