"""Nodes that leave and return, and the end of the service, under load."""

from __future__ import annotations

import sys
import time

import pytest

from tests.clients import describe_errors
from tests.cluster.spread import REPLICAS, Traffic, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

UNSEEN = {"store": False}
STREAMS = 8


@pytest.mark.fault(
    "a node with a replica leaves under load, by `python -m deploy.leave`",
    "no request fails",
    process="node: drained by Ray, then SIGKILL of all its processes",
)
def test_leaving_node_fails_no_request(cluster, fault_result):
    cluster.nodes.join(1)
    clients = cluster.in_flight(streams=STREAMS, answers=0, **UNSEEN)
    (name, node), *_ = cluster.nodes.replicas().items()
    with Traffic(cluster, clients=2, **UNSEEN) as traffic:
        begun = time.monotonic()
        done = cluster.nodes.on(node, sys.executable, "-m", "deploy.leave", "90")
        fault_result.seconds = time.monotonic() - begun
        assert (done.returncode, done.stderr) == (0, "")
        assert not node.actors("ServeReplica")
        cluster.nodes.lose(node)
        wait(lambda: len(replicas := cluster.nodes.replicas()) == REPLICAS and name not in replicas)
    all_clients = [*clients, *traffic.clients]
    fault_result.errors = describe_errors(all_clients)
    assert [client.error() for client in all_clients] == [None] * len(all_clients)


def test_replicas_spread_over_nodes_again(cluster):
    large = cluster.nodes.join(2)
    first, second = cluster.serving()[:2]
    cluster.nodes.lose(first)
    wait(lambda: large in cluster.nodes.replicas().values())
    cluster.nodes.lose(second)
    wait(lambda: set(cluster.nodes.replicas().values()) == {large})
    time.sleep(10)  # long enough for a start on the free CPU of the same node
    assert len(cluster.nodes.replicas()) == 1
    joined = cluster.nodes.join(1)
    wait(lambda: set(cluster.nodes.replicas().values()) == {large, joined})


def test_end_of_the_service_completes_running_streams(cluster):
    clients = cluster.in_flight(streams=STREAMS, answers=0, **UNSEEN)
    try:
        done = cluster.nodes.on(cluster.nodes.head, sys.executable, "-m", "deploy.end", "120")
        assert [client.error() for client in clients] == [None] * STREAMS
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert cluster.nodes.replicas() == {}
        assert cluster.complete().status_code == 503
    finally:
        cluster.deploy()
