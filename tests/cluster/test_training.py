"""Training that is spread over nodes of its own, of which one is lost."""

from __future__ import annotations

import json
import time

import pytest
from safetensors import safe_open

from tests.cluster.nodes import Node
from tests.cluster.spread import DOMAIN, REPLICAS, TRAINER, TRAINING, WORKERS, Cluster, Traffic, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def saved(cluster: Cluster) -> int:
    """Steps that the checkpoint holds, 0 where there is none yet."""
    file = cluster.nodes.home / "trainer" / f"{DOMAIN}.safetensors"
    if not file.exists():
        return 0
    # Not by the trainer's own function, which clears away what others have begun to write.
    with safe_open(file, "pt") as checkpoint:
        return json.loads(checkpoint.metadata()["state"])["distiller"]["steps"]


def processes(cluster: Cluster) -> set[int]:
    return {pid for pids in cluster.ranks().values() for pid in pids}


def goes_on(cluster: Cluster, node: Node, before: set[int]) -> None:
    """Wait for a new group on ``node``, and see that the first checkpoint that it writes goes on from the last one."""
    wait(lambda: not processes(cluster) & before)
    held = saved(cluster)
    wait(lambda: set(cluster.ranks()) == {node} and len(processes(cluster)) == WORKERS)
    wait(lambda: saved(cluster) != held)
    print(f"the checkpoint was at {held} steps, and is at {saved(cluster)}")
    assert saved(cluster) > held > 0


@pytest.mark.fault(
    "a node with one of several training workers is lost",
    "training continues from the checkpoint on the remaining node, and no request fails",
)
@pytest.mark.parametrize("with_the_actor", [True, False])
def test_training_goes_on_from_the_checkpoint_when_one_of_its_nodes_is_lost(cluster, aftermath, with_the_actor):
    with Traffic(cluster, clients=1, max_tokens=32) as traffic:
        wait(lambda: saved(cluster) > 0)
        before = processes(cluster)
        (actor,) = [node for node in cluster.training() if node.actors(TRAINER)]
        (other,) = [node for node in cluster.training() if node is not actor]
        lost, left = (actor, other) if with_the_actor else (other, actor)
        cluster.nodes.lose(lost)
        lost_at = time.monotonic()
        goes_on(cluster, left, before)
        aftermath.seconds = time.monotonic() - lost_at
    assert [client.error() for client in traffic.asked] == [None] * len(traffic.asked)
    aftermath.errors = "none"


def test_the_trainer_waits_for_a_node_with_its_label_and_goes_on_there(cluster):
    with Traffic(cluster, clients=1, max_tokens=32) as traffic:
        wait(lambda: saved(cluster) > 0)
        before = processes(cluster)
        for node in cluster.training():
            cluster.nodes.lose(node)
        wait(lambda: len(cluster.nodes.living()) == 1 + REPLICAS)  # the head, and those that serve
        time.sleep(5)  # in which it would start elsewhere
        assert not processes(cluster)
        assert not any(node.actors(TRAINER) for node in cluster.nodes.all)
        goes_on(cluster, cluster.nodes.join(0, TRAINING), before)
    assert [client.error() for client in traffic.asked] == [None] * len(traffic.asked)
