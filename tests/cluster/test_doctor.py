"""``osd doctor --cluster`` on a cluster that is well, and with faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.cluster.nodes import TOKEN, Nodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def findings(nodes: Nodes, **settings: object) -> list[dict[str, Any]]:
    """Return the findings on the head for the deployed file with other settings."""
    config = yaml.safe_load((nodes.home / "serve.yaml").read_text())
    config["applications"][0]["args"] |= settings
    (nodes.home / "checked.yaml").write_text(yaml.safe_dump(config))
    done = nodes.on(nodes.head, "osd", "doctor", "--json", "--cluster", "/data/checked.yaml")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == int("failure" in {finding["state"] for finding in found}), done.stderr
    return found


def failures(nodes: Nodes, **settings: object) -> list[str]:
    return [finding["says"] for finding in findings(nodes, **settings) if finding["state"] == "failure"]


def test_doctor_finds_no_failure_on_a_healthy_cluster(cluster):
    found = {finding["check"]: finding for finding in findings(cluster.nodes)}
    assert {finding["state"] for finding in found.values()} == {"ok"}, found
    assert "is the same folder on 5 nodes" in found["home"]["says"]


def test_doctor_reports_a_gpu_that_no_node_has(cluster):
    settings = {"target.device": "cuda"}
    assert failures(cluster.nodes, **settings) == ["target.device is cuda, and no node of the cluster has a GPU"]


def test_doctor_reports_a_folder_that_is_not_shared(cluster):
    node = cluster.nodes.join(0)
    try:
        separate = f"mount -t tmpfs tmpfs /data && echo {TOKEN} >/data/ray-token"
        assert node.machine.run("/bin/sh", "-c", separate).returncode == 0
        says, *others = failures(cluster.nodes)
        assert says.startswith(f"home /data of {node.ip} is not the folder of this node")
        assert all(other.startswith(f"on {node.ip}: ") for other in others)
    finally:
        cluster.nodes.lose(node)


def test_doctor_reports_a_folder_that_a_node_cannot_write(cluster):
    node = cluster.nodes.join(0)
    try:
        assert node.machine.run("/bin/sh", "-c", "mount -o remount,bind,ro /data").returncode == 0
        (says,) = failures(cluster.nodes)
        assert says.startswith(f"home /data of {node.ip} cannot be written: Read-only file system")
    finally:
        cluster.nodes.lose(node)


def test_doctor_reports_a_redis_that_one_node_cannot_reach(cluster):
    node = cluster.nodes.join(0)
    try:
        other = "sed 's/^.* redis$/192.0.2.98 redis/' /etc/hosts >/tmp/hosts && cat /tmp/hosts >/etc/hosts"
        assert node.machine.run("/bin/sh", "-c", other).returncode == 0
        (says,) = failures(cluster.nodes)
        assert says.startswith(f"on {node.ip}: redis_url redis://redis:6379/0: ")
    finally:
        cluster.nodes.lose(node)


def test_doctor_reports_a_redis_that_does_not_answer(cluster):
    says, *_ = failures(cluster.nodes, redis_url="redis://192.0.2.99:6379/0")
    assert says.startswith("redis_url redis://192.0.2.99:6379/0: cannot connect")
