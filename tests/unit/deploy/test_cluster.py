from __future__ import annotations

import pytest

from deploy import cluster
from osd.config import Settings


@pytest.mark.parametrize(
    ("labels", "node", "said"),
    [
        ((), {"Alive": True, "Labels": {}}, False),
        (("role=training",), {"Alive": True, "Labels": {"role": "training", "zone": "a"}}, False),
        (("role=training",), {"Alive": False, "Labels": {"role": "training"}}, True),
        (("role=training", "zone=b"), {"Alive": True, "Labels": {"role": "training", "zone": "a"}}, True),
    ],
)
def test_a_trainer_that_waits_for_a_node_says_so(labels, node, said, monkeypatch, caplog):
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [node])
    cluster._look_for_nodes(Settings(trainer={"node_labels": labels}))
    line = f"trainer.node_labels {', '.join(labels)}: no node has them, and the trainer waits for one"
    assert [record.message for record in caplog.records] == [line] * said
