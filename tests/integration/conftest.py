"""Fixtures of the integration tests: a real Redis, traces, and a distribution that a drafter can learn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.torch import load_file

from osd.capture.server import RedisServer
from osd.capture.trace import Array, Trace
from tests.integration.loop import Loop
from tests.priority import keep_priority
from tests.tiny import HIDDEN, VOCABULARY
from tests.traces import small_trace


@pytest.fixture(autouse=True)
def _normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train at normal priority; see ``tests.priority``."""
    monkeypatch.setattr("os.nice", os.nice)  # restored after the test
    keep_priority()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Server for all tests; a test that stops it starts it again."""
    with RedisServer(max_memory_mb=128) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of a running, empty database."""
    redis_server.start()
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory", "128mb")
        client.flushall()
    return redis_server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """Redis client with the reply types of protocol 2."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    """Function that makes a trace of 4 prompt and 3 completion tokens, with ``padding`` floats of hidden state."""

    def make(request_id: str = "r", padding: int = 2) -> Trace:
        return small_trace(request_id=request_id, hidden=Array.of(np.zeros((6, padding), np.float32)))

    return make


@pytest.fixture(scope="session")
def next_token_logits(tiny_target: Path) -> np.ndarray:
    """Logits [V, V] of the next token after each token, in the range of the target's head."""
    head = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"].float().numpy()
    logits = np.random.default_rng(0).normal(size=(VOCABULARY, HIDDEN)) @ head.T
    return logits / logits.std() * 3


@pytest.fixture
def make_loop(redis_url, tmp_path, ends):
    return lambda url=redis_url, **trainer: ends.enter_context(closing(Loop(url, tmp_path, **trainer)))
