"""Choice of replicas by the router; tests/cluster/test_routing.py runs it in a real proxy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from serving.http.affinity import Affinity
from serving.http.replica_router import PrefixRouter

DEPLOYMENT = DeploymentID("osd", "osd")
BODY = json.dumps({"prompt": "p" * 500, "model": "llm:code"}).encode()


@dataclass(frozen=True)
class Replica:
    """Fields of a replica that routers read."""

    name: str
    max_ongoing_requests: int = 10

    @property
    def replica_id(self):
        return ReplicaID(self.name, DEPLOYMENT)


REPLICAS = [Replica(name) for name in "abc"]


class ProbedRouter:
    """Router that records the replicas it probed for their number of requests."""

    def __init__(self, prefix_cache=True, **known):
        self.probed = []
        self.router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.PROXY, use_replica_queue_len_cache=True)
        self.router.initialize_state(domain="general", imbalance=2, prefix_cache=prefix_cache)
        self.router._probe_queue_lens = self._probe
        for name, load in known.items():
            self.router.replica_queue_len_cache.update(ReplicaID(name, DEPLOYMENT), load)

    async def _probe(self, replicas, backoff):
        self.probed += [replica.name for replica in replicas]
        return [(replica, {"a": 1, "b": 4, "c": None}[replica.name]) for replica in replicas]

    def order(self, request):
        ranks = asyncio.run(self.router.choose_replicas(REPLICAS, request))
        assert all(len(rank) == 1 for rank in ranks)
        return [replica.name for rank in ranks for replica in rank]


def request(body=BODY):
    async def create():
        return PendingRequest([], {}, RequestMetadata("r", "r", session_id=str(Affinity.of(body, b""))))

    return asyncio.run(create())


def test_replica_with_the_prefix_is_preferred_within_imbalance():
    router = ProbedRouter(a=1, b=3, c=0)
    assert router.order(request())[0] == "c"
    router.router.on_request_routed(request(), ReplicaID("a", DEPLOYMENT), None)
    assert router.order(request()) == ["a", "c", "b"]
    router.router.on_request_routed(request(), ReplicaID("b", DEPLOYMENT), None)
    assert router.order(request()) == ["a", "c", "b"]
    assert router.probed == []


def test_unknown_loads_are_probed_and_silent_replicas_come_last():
    router = ProbedRouter(a=3)
    assert router.order(None) == ["a", "b", "c"]
    assert router.probed == ["b", "c"]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_prefix_cache_only_the_domain_counts(prefix_cache):
    router = ProbedRouter(prefix_cache, a=0, b=0, c=0)
    router.router.on_request_routed(request(), ReplicaID("b", DEPLOYMENT), None)
    plain = json.dumps({"prompt": "p" * 500}).encode()
    first = {router.order(request(plain))[0] for _ in range(40)}
    assert first == ({"b"} if prefix_cache else {"a", "b", "c"})
    assert router.order(request())[0] == "b"


def test_handle_calls_go_to_the_least_loaded_replica():
    assert ProbedRouter(a=2, b=1, c=0).order(None)[0] == "c"
