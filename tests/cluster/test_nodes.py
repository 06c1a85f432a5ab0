"""Nodes that join and fail under a service that is spread over them."""

from __future__ import annotations

import time

import pytest

from serving.replica.reporter import REPORT_SECONDS
from tests.clients import Service, describe_errors
from tests.cluster.spread import REPLICAS, TRAINER, Traffic, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

ROLLOUT_SECONDS = 2.0
RECOVERED_SECONDS = 30.0
COUNTED = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
UNSEEN = {"store": False}
"""Request fields that keep an answer out of training."""


def counts(service: Service) -> dict[str, float]:
    """Return the counters in ``/metrics`` of a proxy."""
    return {name: service.metric(name) for name in COUNTED}


def settled(service: Service) -> dict[str, float]:
    """Return the counters once every replica has reported its last work."""
    while True:
        before = counts(service)
        time.sleep(2 * REPORT_SECONDS)
        if counts(service) == before:
            return before


def test_replicas_and_trainers_run_on_separate_nodes(cluster):
    serving = set(cluster.nodes.replicas().values())
    assert len(serving) == REPLICAS
    assert serving == set(cluster.serving())
    assert set(cluster.ranks()) == set(cluster.training())
    (trainer,) = [node for node in cluster.nodes.all if node.actors(TRAINER)]
    assert trainer in cluster.training()
    assert not cluster.nodes.head.actors("ServeReplica")
    assert {node for node in cluster.nodes.all if node.actors("ProxyActor")} == {cluster.nodes.head, *serving}


def test_rollout_reaches_all_replicas_under_load(cluster):
    with Traffic(cluster, clients=4, **UNSEEN) as traffic:
        for _ in range(3):
            number = cluster.publish()
            moved_at = cluster.roll_out(number)
            wait(lambda number=number: set(cluster.versions().values()) == {number})
            swaps = [event["time"] for event in cluster.events("swapped") if event["version"] == number]
            assert len(swaps) == REPLICAS
            print(f"version {number} is in all replicas after {max(swaps) - moved_at:.2f} s")
            assert max(swaps) - moved_at <= ROLLOUT_SECONDS
    assert [client.error() for client in traffic.clients] == [None] * len(traffic.clients)


def test_every_proxy_sums_the_metrics_of_all_nodes(cluster):
    before, proxies = settled(cluster), [cluster.at(node) for node in cluster.serving()]
    requests = 0
    for proxy in proxies:
        for _ in range(4):
            assert proxy.complete(max_tokens=5, **UNSEEN).status_code == 200
            requests += 1
    expected = [before[COUNTED[0]] + 5 * requests, before[COUNTED[1]] + 5 * requests, before[COUNTED[2]] + requests]
    for proxy in (cluster, *proxies):
        wait(lambda proxy=proxy: list(counts(proxy).values()) == expected, seconds=10)


@pytest.mark.fault(
    "a node with a replica is lost during a rollout under load",
    "only requests that it was decoding fail; within 30 s there are as many replicas as before, all with the "
    "new version; no counter falls",
    process="node: SIGKILL of all its processes",
)
def test_lost_node_loses_only_the_requests_it_decoded(cluster, fault_result):
    cluster.nodes.join(1)
    before = settled(cluster)
    clients = cluster.in_flight(streams=6, answers=2, **UNSEEN)
    decoding = cluster.loads()
    (name, node), *_ = cluster.nodes.replicas().items()
    number = cluster.publish()
    with Traffic(cluster, clients=2, **UNSEEN) as traffic:
        wait(lambda: len(traffic.clients) > 4)
        cluster.roll_out(number)
        cluster.nodes.lose(node)
        lost_at = time.monotonic()
        wait(lambda: node.ip not in cluster.nodes.living())
        noticed = time.monotonic() - lost_at
        wait(lambda: len(replicas := cluster.versions()) == REPLICAS and name not in replicas)
        fault_result.seconds = time.monotonic() - lost_at
    all_clients = [*clients, *traffic.clients]
    failed = [client for client in all_clients if client.error() is not None]
    fault_result.errors = describe_errors(all_clients)
    print(f"it decoded {decoding[name]} long requests; {fault_result.errors}; "
          f"noticed after {noticed:.1f} s, recovered after {fault_result.seconds:.1f} s")  # fmt: skip
    assert [client for client in failed if client.started_at > lost_at] == []
    assert len([client for client in failed if client in clients]) <= decoding[name]
    wait(lambda: set(cluster.versions().values()) == {number})
    after = counts(cluster)
    assert all(after[key] >= before[key] for key in COUNTED), (before, after)
    assert fault_result.seconds <= RECOVERED_SECONDS


def test_new_node_starts_with_the_stable_version(cluster):
    (name, node), *_ = cluster.nodes.replicas().items()
    cluster.nodes.lose(node)
    number = cluster.publish()
    cluster.roll_out(number)
    wait(lambda: set(cluster.versions().values()) == {number} and name not in cluster.versions())
    joined = cluster.nodes.join(1)
    seen: dict[str, set[int]] = {}
    while len(seen) < REPLICAS:
        for replica, version in cluster.versions().items():
            seen.setdefault(replica, set()).add(version)
        time.sleep(0.05)
    wait(lambda: joined in cluster.nodes.replicas().values())
    assert all(versions == {number} for versions in seen.values()), seen
    assert [event["version"] for event in cluster.events("swapped")].count(number) == 1  # by the existing replica
