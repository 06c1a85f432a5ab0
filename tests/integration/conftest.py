"""A real Redis for the tests, and traces to put on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis

from osd.capture.server import RedisServer
from osd.capture.trace import Array, Trace


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests; those that stop it start it again."""
    with RedisServer(max_memory_mb=128) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of a running, empty database."""
    redis_server.start()
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory", "128mb")
        client.flushall()
    return redis_server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client to look into Redis with, old reply types."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    """Makes a whole trace of 4 prompt and 3 completion tokens; ``padding`` floats of hidden state make it large."""

    def make(request_id: str = "r", padding: int = 2) -> Trace:
        top = np.zeros((3, 2), np.int32), np.full((3, 2), -1.0, np.float16), np.full(3, -2.0, np.float16)
        ids, logp, tail = (Array.of(values) for values in top)
        return Trace(
            request_id=request_id,
            piece=0,
            domain="general",
            target="tiny",
            drafter_version=1,
            created=1.0,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            prompt_ids=Array.of(np.arange(4, dtype=np.int32)),
            completion_ids=Array.of(np.arange(3, dtype=np.int32)),
            target_ids=ids,
            target_logp=logp,
            target_tail=tail,
            draft_ids=ids,
            draft_logp=logp,
            draft_tail=tail,
            drafted=Array.of(np.array([-1, 1, 2], np.int32)),
            verdict=Array.of(np.array([0, 1, 2], np.uint8)),
            hidden=Array.of(np.zeros((6, padding), np.float32)),
        )

    return make


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits until a condition holds, and fails when it does not within ten seconds."""

    def wait(condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.01)

    return wait
