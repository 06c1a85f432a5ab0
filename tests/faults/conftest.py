"""Service, Redis and settings of a replica for tests of faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from osd.capture.server import RedisServer
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
