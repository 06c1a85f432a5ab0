from __future__ import annotations

import pytest

from deploy import cluster
from osd.config import Settings


@pytest.mark.parametrize(
    ("labels", "node", "warns"),
    [
        ((), {"Alive": True, "Labels": {}}, False),
        (("role=training",), {"Alive": True, "Labels": {"role": "training", "zone": "a"}}, False),
        (("role=training",), {"Alive": False, "Labels": {"role": "training"}}, True),
        (("role=training", "zone=b"), {"Alive": True, "Labels": {"role": "training", "zone": "a"}}, True),
    ],
)
def test_trainer_without_a_matching_node_logs_a_warning(labels, node, warns, monkeypatch, caplog):
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [node])
    cluster._look_for_nodes(Settings(trainer={"node_labels": labels}))
    line = f"trainer.node_labels {', '.join(labels)}: no node has them, and the trainer waits for such a node"
    assert [record.message for record in caplog.records] == [line] * warns
