"""Which of several replicas is asked, and how many there are."""

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
"""Tokens of the tiny target."""
FEWER = 0.4
REPLICAS_SECONDS = 150.0


def prompts() -> Iterator[str]:
    """Each has one of the shared beginnings, drawn at random, and an end of its own."""
    drawn = np.random.default_rng(0).integers(BEGINNINGS, size=REQUESTS)
    for number, shared in enumerate(drawn):
        yield (f"Beginning {shared}. " * SHARED_BYTES)[:SHARED_BYTES] + f"Question {number:04d}"


def read(up: Up) -> float:
    """Prompt tokens that replicas have read, and did not have from before."""
    time.sleep(2 * REPORT_SECONDS)
    return up.metric("vllm:prompt_tokens_total") - up.metric("vllm:prefix_cache_hits_total")


def tokens_read(folder, routing: str) -> float:
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
            wait(lambda: len(traffic.asked) == REQUESTS)
        assert [client.error() for client in traffic.asked] == [None] * REQUESTS
        return read(up) - before


def test_a_stream_of_shared_beginnings_is_read_once_where_it_was_read_by_every_replica(tmp_path):
    by_load, by_beginnings = (tokens_read(tmp_path / routing, routing) for routing in ("load", "beginnings"))
    print(f"prompt tokens read: {by_load:.0f} by load, {by_beginnings:.0f} by beginnings, "
          f"{1 - by_beginnings / by_load:.0%} fewer")  # fmt: skip
    assert by_beginnings <= (1 - FEWER) * by_load


@pytest.mark.fault("the load rises and falls, and replicas scale from 1 to 3 and back to 1", "no request fails")
def test_replicas_come_and_go_with_the_load_and_no_request_fails(tmp_path, aftermath):
    with starting(tmp_path, replicas=1, **{"serving.max_replicas": 3, "engine.slots": 4}) as up:
        with Traffic(up, 1, max_tokens=64) as asked:
            with Traffic(up, 8, max_tokens=64) as more:
                wait(lambda: len(up.loads()) == 3, seconds=REPLICAS_SECONDS)
            wait(lambda: len(up.loads()) == 1, seconds=REPLICAS_SECONDS)
        everyone = asked.asked + more.asked
    failed = [client.error() for client in everyone if client.error() is not None]
    print(f"{len(everyone)} requests, {len(failed)} failed")
    assert failed == []
    aftermath.errors = "none"
