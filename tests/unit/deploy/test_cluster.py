from __future__ import annotations

from types import SimpleNamespace

import pytest

from deploy import cluster
from osd.config import ConfigError, Settings


@pytest.mark.parametrize(("labels", "node", "warns"), [
    ((), {"Alive": True, "Labels": {}}, False),
    (("role=training",), {"Alive": True, "Labels": {"role": "training", "zone": "a"}}, False),
    (("role=training",), {"Alive": False, "Labels": {"role": "training"}}, True),
    (("role=training", "zone=b"), {"Alive": True, "Labels": {"role": "training", "zone": "a"}}, True),
])  # fmt: skip
def test_trainer_without_a_matching_node_logs_a_warning(labels, node, warns, monkeypatch, caplog):
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [node])
    cluster._look_for_nodes(Settings(trainer={"node_labels": labels}))
    line = f"trainer.node_labels {', '.join(labels)}: no node has them, and the trainer waits for such a node"
    assert [record.message for record in caplog.records] == [line] * warns


def test_deployment_without_a_drafter_ends_earlier_trainers(monkeypatch):
    settings = Settings(drafter={"kind": "none"}, redis_url="redis://h/0")
    monkeypatch.setattr(cluster, "checked_settings", lambda args: settings)
    monkeypatch.setattr(cluster, "open_redis", lambda settings: SimpleNamespace(url="redis://h/0"))
    for name in ("check_rules", "prepare", "target_directory"):
        monkeypatch.setattr(cluster, name, lambda *arguments: None)
    monkeypatch.setattr(cluster.serving.app, "build", lambda *arguments: "application")
    running, killed = ["trainer"], []
    monkeypatch.setattr(cluster.trainer.app, "running_trainers", lambda namespace: list(running))
    monkeypatch.setattr(cluster.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(cluster.ray, "kill", lambda name: (killed.append(name), running.remove(name)))
    assert cluster.build({}) == "application"
    assert killed == ["trainer"]


@pytest.mark.parametrize(("argument", "value", "instead"), [
    ("serving.api_key", "hush", "serving.api_key_file"),
    ("serving.admin_key", "hush", "serving.admin_key_file"),
    ("redis_url", "redis://:hush@h/0", "redis.password_file"),
])  # fmt: skip
def test_secret_in_the_arguments_of_a_cluster_is_refused(argument: str, value: str, instead: str):
    with pytest.raises(ConfigError, match=f"{argument} in the arguments .*: use {instead}$") as refused:
        cluster.build({argument: value})
    assert "hush" not in str(refused.value)


def test_public_cluster_without_key_is_refused():
    with pytest.raises(ConfigError, match=r"set serving\.api_key_file"):
        cluster.build({"redis_url": "redis://h/0", "serving.host": "0.0.0.0"})  # noqa: S104
