"""Training on its own nodes during the loss of a node."""

from __future__ import annotations

import json
import time

import pytest
from safetensors import safe_open

from tests.cluster.nodes import Node
from tests.cluster.spread import DOMAIN, REPLICAS, TRAINER, TRAINING, WORKERS, Cluster, Traffic, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def checkpoint_steps(cluster: Cluster) -> int:
    """Return the steps in the checkpoint; 0 without one."""
    file = cluster.nodes.home / "trainer" / f"{DOMAIN}.safetensors"
    if not file.exists():
        return 0
    # The trainer's own function would remove a file that is being written.
    with safe_open(file, "pt") as checkpoint:
        return json.loads(checkpoint.metadata()["state"])["distiller"]["steps"]


def processes(cluster: Cluster) -> set[int]:
    """Return the process ids of all ranks."""
    return {pid for pids in cluster.ranks().values() for pid in pids}


def wait_for_continuation(cluster: Cluster, node: Node, before: set[int]) -> None:
    """Wait for a new group on ``node`` and check that its first checkpoint continues the last one."""
    wait(lambda: not processes(cluster) & before)
    held = checkpoint_steps(cluster)
    wait(lambda: set(cluster.ranks()) == {node} and len(processes(cluster)) == WORKERS)
    wait(lambda: checkpoint_steps(cluster) != held)
    print(f"the checkpoint was at {held} steps, and is at {checkpoint_steps(cluster)}")
    assert checkpoint_steps(cluster) > held > 0


@pytest.mark.fault(
    "a node with one of several training workers is lost",
    "training continues from the checkpoint on the remaining node, and no request fails",
    process="node: SIGKILL of all its processes",
)
@pytest.mark.parametrize("with_the_actor", [True, False])
def test_training_continues_after_the_loss_of_a_node(cluster, fault_result, with_the_actor):
    with Traffic(cluster, clients=1, max_tokens=32) as traffic:
        wait(lambda: checkpoint_steps(cluster) > 0)
        before = processes(cluster)
        (actor,) = [node for node in cluster.training() if node.actors(TRAINER)]
        (other,) = [node for node in cluster.training() if node is not actor]
        lost, remaining = (actor, other) if with_the_actor else (other, actor)
        cluster.nodes.lose(lost)
        lost_at = time.monotonic()
        wait_for_continuation(cluster, remaining, before)
        fault_result.seconds = time.monotonic() - lost_at
    assert [client.error() for client in traffic.clients] == [None] * len(traffic.clients)
    fault_result.errors = "none"


def test_trainer_waits_for_a_node_with_its_label(cluster):
    with Traffic(cluster, clients=1, max_tokens=32) as traffic:
        wait(lambda: checkpoint_steps(cluster) > 0)
        before = processes(cluster)
        for node in cluster.training():
            cluster.nodes.lose(node)
        wait(lambda: len(cluster.nodes.living()) == 1 + REPLICAS)  # the head and the serving nodes
        time.sleep(5)  # long enough for a start on another node
        assert not processes(cluster)
        assert not any(node.actors(TRAINER) for node in cluster.nodes.all)
        wait_for_continuation(cluster, cluster.nodes.join(0, TRAINING), before)
    assert [client.error() for client in traffic.clients] == [None] * len(traffic.clients)
