"""Service, Redis and settings of a replica for tests of faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from osd.capture.server import RedisServer
from osd.config import Settings
from tests.up import Up, starting


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Service for all tests of a file."""
    with starting(tmp_path_factory.mktemp("service")) as up:
        yield up


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """URL of a Redis for all tests of a file."""
    with RedisServer(64) as server:
        yield server.url


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Redis for one test."""
    with RedisServer(64) as server:
        yield server


@pytest.fixture
def replica_settings(tiny_target: Path, tmp_path: Path) -> Settings:
    """Settings of a small replica."""
    return Settings(
        home=tmp_path / "home",
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "language_model", "layers": 1},
        engine={"slots": 2, "context": 256, "threads": 1},
        capture={"max_queue": 4},
    )  # type: ignore[arg-type]
