"""Limits of API keys over all replicas with a real Redis, and in each replica without it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from serving.access.keys import Limits
from serving.access.windows import Windows


@pytest.fixture
def replicas(redis_url, ends):
    return [ends.enter_context(closing(Windows(redis_url))) for _ in range(2)]


def test_request_limit_covers_all_replicas(replicas):
    limits = Limits(requests_per_minute=30)
    with ThreadPoolExecutor(8) as pool:
        used = list(pool.map(lambda number: replicas[number % 2].admit("a", limits), range(60)))
    assert sum(result.admitted for result in used) == 30
    assert replicas[0].admit("b", limits).admitted, "another key has its own budget"


def test_tokens_of_one_replica_close_the_other(replicas):
    first, second = replicas
    limits = Limits(tokens_per_minute=100, tokens_per_day=1000)
    assert second.admit("a", limits).admitted
    first.charge("a", 99)
    assert second.admit("a", limits).admitted
    first.charge("a", 5000)
    used = second.admit("a", limits)
    assert not used.admitted
    assert (used.tokens.remaining, used.quota.remaining) == (0, 0)
    assert used.tokens.used == pytest.approx(5099)
    assert 60 < used.tokens.wait < 120
    assert 86_400 < used.quota.wait < 2 * 86_400


def test_token_counts_survive_changed_limits(replicas):
    replicas[0].charge("a", 50)
    assert replicas[1].admit("a", Limits(tokens_per_minute=60)).tokens.remaining == 10
    assert not replicas[1].admit("a", Limits(tokens_per_minute=40)).admitted


@pytest.mark.fault(
    "Redis dies while keys have limits",
    "each replica enforces the limits alone, and all replicas together after it returns",
    process="redis-server: SIGTERM, then a new process",
)
def test_replica_without_redis_counts_alone_and_warns_once(
    redis_server, redis_url, replicas, caplog, eventually, fault_result
):
    limits = Limits(requests_per_minute=3, tokens_per_minute=100)
    first, second = replicas
    assert first.admit("a", limits).admitted
    redis_server.close()
    for windows in replicas:
        caplog.clear()
        assert [windows.admit("a", limits).admitted for _ in range(4)] == [True, True, True, False]
        windows.charge("b", 100)
        assert not windows.admit("b", limits).admitted
        assert len(caplog.records) == 1
        assert "Redis does not answer" in caplog.text
    redis_server.start()
    caplog.clear()
    began = time.monotonic()
    eventually(lambda: first.admit("c", limits).tokens and "over all replicas again" in caplog.text)
    first.charge("d", 100)
    eventually(lambda: not second.admit("d", limits).admitted)
    fault_result.lost, fault_result.errors = "counts during the outage", "none"
    fault_result.seconds = time.monotonic() - began
