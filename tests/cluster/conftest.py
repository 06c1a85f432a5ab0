"""Ray cluster for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import running
from tests.cluster.spread import REPLICAS, TRAINING, WORKERS, Cluster
from tests.tiny import make_tiny

LAYERS = 96
"""Number of layers, so that a long completion takes seconds."""


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Running cluster with the deployed service."""
    home: Path = tmp_path_factory.mktemp("home")
    with running(home) as nodes:
        for _ in range(REPLICAS):
            nodes.join(1)
        for _ in range(WORKERS):
            nodes.join(0, TRAINING)
        nodes.deploy(
            **{
                "target.source": make_tiny(home / "tiny", layers=LAYERS),
                "target.dtype": "float32",
                "engine.slots": 8,
                "engine.context": 1024,
                "engine.threads": 1,
                "drafter.kind": "eagle",
                "drafter.vocabulary": 128,
                "growth.kind": "chain",
                "growth.governed": "false",  # drafts do not pay on such a small target
                "trainer.node_labels": TRAINING,
                "trainer.min_records": 4,
                "trainer.steps_per_candidate": 15,
                "trainer.price": 0,  # train regardless of the gain
                "trainer.duty": 1,
                "trainer.tracking": "none",
            }
        )
        nodes.wait_until_deployed()
        yield Cluster(nodes.head.port, nodes)


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """Cluster in its initial state for each test."""
    started.heal()
    return started
