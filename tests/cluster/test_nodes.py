"""Nodes that come and go under a service that is spread over them."""

from __future__ import annotations

import time

import pytest

from serving.replica.reporter import REPORT_SECONDS
from tests.clients import Service, told
from tests.cluster.spread import REPLICAS, TRAINER, Traffic, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

ROLLOUT_SECONDS = 2.0
RECOVERED_SECONDS = 30.0
COUNTED = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
UNSEEN = {"store": False}
"""Nobody trains on it, and no version comes of it."""


def counts(port: int) -> dict[str, float]:
    """What ``/metrics`` says at a proxy."""
    return {name: Service(port).metric(name) for name in COUNTED}


def settled(port: int) -> dict[str, float]:
    """The same, when every replica has told what it did last."""
    while True:
        before = counts(port)
        time.sleep(2 * REPORT_SECONDS)
        if counts(port) == before:
            return before


def test_replicas_are_on_different_nodes_the_trainer_is_on_others_and_the_head_has_none(cluster):
    serving = set(cluster.nodes.replicas().values())
    assert len(serving) == REPLICAS
    assert serving == set(cluster.serving())
    assert set(cluster.ranks()) == set(cluster.training())
    (trainer,) = [node for node in cluster.nodes.all if node.actors(TRAINER)]
    assert trainer in cluster.training()
    assert not cluster.nodes.head.actors("ServeReplica")
    assert {node for node in cluster.nodes.all if node.actors("ProxyActor")} == {cluster.nodes.head, *serving}


def test_a_rollout_reaches_all_replicas_within_two_seconds_under_load(cluster):
    with Traffic(cluster, clients=4, **UNSEEN) as traffic:
        for _ in range(3):
            number = cluster.publish()
            said_at = cluster.roll_out(number)
            wait(lambda number=number: set(cluster.versions().values()) == {number})
            swaps = [event["time"] for event in cluster.events("swapped") if event["version"] == number]
            assert len(swaps) == REPLICAS
            print(f"version {number} is in all replicas after {max(swaps) - said_at:.2f} s")
            assert max(swaps) - said_at <= ROLLOUT_SECONDS
    assert [client.error() for client in traffic.asked] == [None] * len(traffic.asked)


def test_every_proxy_tells_the_metrics_of_all_nodes_summed(cluster):
    before, ports = settled(cluster.port), [node.port for node in cluster.serving()]
    asked = 0
    for port in ports:
        for _ in range(4):
            assert Service(port).complete(max_tokens=5, **UNSEEN).status_code == 200
            asked += 1
    expected = [before[COUNTED[0]] + 5 * asked, before[COUNTED[1]] + 5 * asked, before[COUNTED[2]] + asked]
    for port in (cluster.port, *ports):
        wait(lambda port=port: list(counts(port).values()) == expected, seconds=10)


@pytest.mark.fault(
    "a node with a replica is lost during a rollout under load",
    "only requests that it was decoding fail; within 30 s there are as many replicas as before, all with the "
    "new version; no counter falls",
)
def test_a_node_that_is_lost_takes_only_what_it_was_decoding(cluster, aftermath):
    cluster.nodes.join(1)
    before = settled(cluster.port)
    clients = cluster.in_flight(streams=6, others=2, **UNSEEN)
    decoding = cluster.loads()
    (name, node), *_ = cluster.nodes.replicas().items()
    number = cluster.publish()
    with Traffic(cluster, clients=2, **UNSEEN) as traffic:
        wait(lambda: len(traffic.asked) > 4)
        cluster.roll_out(number)
        cluster.nodes.lose(node)
        lost_at = time.monotonic()
        wait(lambda: node.ip not in cluster.nodes.living())
        noticed = time.monotonic() - lost_at
        wait(lambda: len(replicas := cluster.versions()) == REPLICAS and name not in replicas)
        aftermath.seconds = time.monotonic() - lost_at
    everyone = [*clients, *traffic.asked]
    failed = [client for client in everyone if client.error() is not None]
    aftermath.errors = told(everyone)
    print(f"it decoded {decoding[name]} long requests; {aftermath.errors}; "
          f"noticed after {noticed:.1f} s, well after {aftermath.seconds:.1f} s")  # fmt: skip
    assert [client for client in failed if client.started_at > lost_at] == []
    assert len([client for client in failed if client in clients]) <= decoding[name]
    wait(lambda: set(cluster.versions().values()) == {number})
    after = counts(cluster.port)
    assert all(after[key] >= before[key] for key in COUNTED), (before, after)
    assert aftermath.seconds <= RECOVERED_SECONDS


def test_a_node_that_joins_starts_on_the_stable_version(cluster):
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
    assert [event["version"] for event in cluster.events("swapped")].count(number) == 1  # the one that was there
