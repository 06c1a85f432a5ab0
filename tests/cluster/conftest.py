"""Ray cluster for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import HEAD, HEADERS, PORT, running
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
        make_tiny(home / "tiny", layers=LAYERS)
        cluster = Cluster(PORT, nodes, headers=HEADERS, host=HEAD)
        cluster.deploy()
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """Cluster in its initial state for each test."""
    started.heal()
    return started
