"""Nodes and Redis that fall silent: the network drops all that they send and are sent."""

from __future__ import annotations

import time

import pytest

from tests.clients import describe_errors
from tests.cluster.spread import REPLICAS, Traffic, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SHORT_SECONDS, LONG_SECONDS, QUIET_SECONDS = 10, 40, 10
UNSEEN = {"store": False}


def errors_of(traffic: Traffic) -> list[object]:
    return [error for client in traffic.clients if (error := client.error()) is not None]


@pytest.mark.fault(
    "a node with a replica is silent for 10 s",
    "no request fails and no node is lost",
    process="node: its network drops everything",
)
def test_short_silence_of_a_node_fails_no_request(cluster, fault_result):
    living = set(cluster.nodes.living())
    (node, *_) = cluster.nodes.replicas().values()
    with Traffic(cluster, clients=4, **UNSEEN) as traffic:
        wait(lambda: len(traffic.clients) > 8)
        node.machine.cut()
        time.sleep(SHORT_SECONDS)
        node.machine.heal()
        time.sleep(QUIET_SECONDS)
    assert errors_of(traffic) == []
    assert set(cluster.nodes.living()) == living
    fault_result.errors = describe_errors(traffic.clients)


@pytest.mark.fault(
    "a node with a replica falls silent under load",
    "only requests that were sent to it fail, each before the node counts as lost; there are as many replicas as "
    "before, and the raylet ends when it is connected again",
    process="node: its network drops everything",
)
def test_silent_node_ends_its_requests_before_it_is_missed(cluster, fault_result):
    cluster.nodes.join(1)
    clients = cluster.in_flight(streams=6, answers=2, **UNSEEN)
    (name, node), *_ = cluster.nodes.replicas().items()
    with Traffic(cluster, clients=2, **UNSEEN) as traffic:
        wait(lambda: len(traffic.clients) > 4)
        node.machine.cut()
        cut_at = time.monotonic()
        wait(lambda: node.ip not in cluster.nodes.living())
        missed_at = time.monotonic()
        wait(lambda: len(replicas := cluster.nodes.replicas()) == REPLICAS and name not in replicas)
        fault_result.seconds = time.monotonic() - cut_at
        time.sleep(QUIET_SECONDS)
        node.machine.heal()
        wait(lambda: node.machine.process.poll() is not None)
        ended_at = time.monotonic()
    all_clients = [*clients, *traffic.clients]
    failed = [client for client in all_clients if client.error() is not None]
    fault_result.errors = describe_errors(all_clients)
    last = max((client.ended_at for client in failed), default=cut_at)
    begun = max((client.started_at for client in failed), default=cut_at)
    print(f"{fault_result.errors} of {len(all_clients)}; the last failed {last - cut_at:.1f} s after the cut and began "
          f"after {begun - cut_at:.1f} s; missed after {missed_at - cut_at:.1f} s, replicas after "
          f"{fault_result.seconds:.1f} s, raylet ended after {ended_at - cut_at:.1f} s")  # fmt: skip
    assert [client for client in failed if client in clients]
    assert last < missed_at


@pytest.mark.fault(
    "the Redis of a cluster, with traces and with the tables of Ray, is silent for 40 s",
    "no request fails and no node is lost",
    process="redis-server: its network drops everything",
)
def test_silent_redis_loses_no_node(cluster, fault_result):
    living, replicas = set(cluster.nodes.living()), set(cluster.nodes.replicas())
    with Traffic(cluster, clients=2, **UNSEEN) as traffic:
        wait(lambda: len(traffic.clients) > 4)
        cluster.nodes.redis.cut()
        time.sleep(LONG_SECONDS)
        cluster.nodes.redis.heal()
        time.sleep(LONG_SECONDS)
        wait(lambda: set(cluster.nodes.living()) == living)
    assert errors_of(traffic) == []
    assert set(cluster.nodes.replicas()) == replicas
    fault_result.errors = describe_errors(traffic.clients)
