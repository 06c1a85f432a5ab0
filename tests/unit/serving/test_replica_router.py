"""What Ray is told of which replica to ask; tests/cluster/test_routing.py has it in a real proxy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from serving.http.affinity import Affinity
from serving.http.replica_router import BeginningsRouter

DEPLOYMENT = DeploymentID("osd", "osd")
BODY = json.dumps({"prompt": "p" * 500, "model": "llm:code"}).encode()


@dataclass(frozen=True)
class Replica:
    """As much of one as routers look at."""

    name: str
    max_ongoing_requests: int = 10

    @property
    def replica_id(self):
        return ReplicaID(self.name, DEPLOYMENT)


REPLICAS = [Replica(name) for name in "abc"]


class Asked:
    """A router, and which replicas were asked for the number of their requests."""

    def __init__(self, prefix_cache=True, **known):
        self.probed = []
        self.router = BeginningsRouter(DEPLOYMENT, DeploymentHandleSource.PROXY, use_replica_queue_len_cache=True)
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
    async def made():
        return PendingRequest([], {}, RequestMetadata("r", "r", session_id=str(Affinity.of(body, b""))))

    return asyncio.run(made())


def test_a_replica_that_was_asked_how_the_prompt_begins_is_asked_again_within_the_imbalance():
    asked = Asked(a=1, b=3, c=0)
    assert asked.order(request())[0] == "c"
    asked.router.on_request_routed(request(), ReplicaID("a", DEPLOYMENT), None)
    assert asked.order(request()) == ["a", "c", "b"]
    asked.router.on_request_routed(request(), ReplicaID("b", DEPLOYMENT), None)
    assert asked.order(request()) == ["a", "c", "b"]
    assert asked.probed == []


def test_who_is_not_known_is_asked_for_its_requests_and_comes_last_where_it_does_not_answer():
    asked = Asked(a=3)
    assert asked.order(None) == ["a", "b", "c"]
    assert asked.probed == ["b", "c"]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_a_prefix_cache_the_domain_alone_counts(prefix_cache):
    asked = Asked(prefix_cache, a=0, b=0, c=0)
    asked.router.on_request_routed(request(), ReplicaID("b", DEPLOYMENT), None)
    plain = json.dumps({"prompt": "p" * 500}).encode()
    first = {asked.order(request(plain))[0] for _ in range(40)}
    assert first == ({"b"} if prefix_cache else {"a", "b", "c"})
    assert asked.order(request())[0] == "b"


def test_calls_through_a_handle_go_to_the_idlest():
    assert Asked(a=2, b=1, c=0).order(None)[0] == "c"
