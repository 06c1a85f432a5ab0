"""Routing to several replicas, and their number."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from serving.replica.reporter import REPORT_SECONDS
from tests.cluster.spread import Traffic, wait
from tests.tiny import make_tiny
from tests.up import Up, starting

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]

BEGINNINGS, REQUESTS, CLIENTS = 20, 400, 4
SHARED_BYTES = 400
"""Length of a shared beginning, in tokens of the tiny target."""
FEWER = 0.4
REPLICAS_SECONDS = 150.0


def prompts() -> Iterator[str]:
    """Yield prompts that each have a random shared beginning and a unique end."""
    drawn = np.random.default_rng(0).integers(BEGINNINGS, size=REQUESTS)
    for number, shared in enumerate(drawn):
        yield (f"Beginning {shared}. " * SHARED_BYTES)[:SHARED_BYTES] + f"Question {number:04d}"


def read(up: Up) -> float:
    """Return the prompt tokens that replicas have computed, without those from the prefix cache."""
    time.sleep(2 * REPORT_SECONDS)
    return up.metric("vllm:prompt_tokens_total") - up.metric("vllm:prefix_cache_hits_total")


def tokens_read(folder, routing: str) -> float:
    """Return the computed prompt tokens of all requests with one routing policy."""
    folder.mkdir()
    settings = {
        "target.source": make_tiny(folder / "target"),
        "serving.routing": routing,
        "serving.max_queue": 64,
        "engine.slots": 16,
    }
    with starting(folder, **settings) as up:
        before = read(up)
        with Traffic(up, CLIENTS, prompts=prompts(), max_tokens=2) as traffic:
            wait(lambda: len(traffic.clients) == REQUESTS)
        assert [client.error() for client in traffic.clients] == [None] * REQUESTS
        return read(up) - before


def test_routing_by_beginnings_computes_fewer_tokens(tmp_path):
    by_load, by_beginnings = (tokens_read(tmp_path / routing, routing) for routing in ("load", "beginnings"))
    print(f"prompt tokens read: {by_load:.0f} by load, {by_beginnings:.0f} by beginnings, "
          f"{1 - by_beginnings / by_load:.0%} fewer")  # fmt: skip
    assert by_beginnings <= (1 - FEWER) * by_load


@pytest.mark.fault(
    "the load rises and falls, and replicas scale from 1 to 3 and back to 1",
    "no request fails",
    process="replica: started and ended by Ray Serve",
)
def test_autoscaling_fails_no_request(tmp_path, fault_result):
    with starting(tmp_path, replicas=1, **{"serving.max_replicas": 3, "engine.slots": 4}) as up:
        with Traffic(up, 1, max_tokens=64) as steady:
            with Traffic(up, 8, max_tokens=64) as burst:
                wait(lambda: len(up.loads()) == 3, seconds=REPLICAS_SECONDS)
            wait(lambda: len(up.loads()) == 1, seconds=REPLICAS_SECONDS)
        clients = steady.clients + burst.clients
    failed = [client.error() for client in clients if client.error() is not None]
    print(f"{len(clients)} requests, {len(failed)} failed")
    assert failed == []
    fault_result.errors = "none"
