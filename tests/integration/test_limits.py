"""What keys use is counted over all replicas in Redis, and in each for itself while there is none."""

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


def test_requests_of_all_replicas_count_together_and_no_more_than_the_limit_are_let_in(replicas):
    limits = Limits(requests_per_minute=30)
    with ThreadPoolExecutor(8) as pool:
        used = list(pool.map(lambda number: replicas[number % 2].admit("a", limits), range(60)))
    assert sum(one.admitted for one in used) == 30
    assert replicas[0].admit("b", limits).admitted, "another key has a budget of its own"


def test_tokens_that_one_replica_charges_close_the_other_also_far_above_the_limit(replicas):
    one, other = replicas
    limits = Limits(tokens_per_minute=100, tokens_per_day=1000)
    assert other.admit("a", limits).admitted
    one.charge("a", 99)
    assert other.admit("a", limits).admitted
    one.charge("a", 5000)
    used = other.admit("a", limits)
    assert not used.admitted
    assert (used.tokens.remaining, used.quota.remaining) == (0, 0)
    assert used.tokens.used == pytest.approx(5099)
    assert 60 < used.tokens.wait < 120
    assert 86_400 < used.quota.wait < 2 * 86_400


def test_counts_stay_when_the_limits_of_tokens_change(replicas):
    replicas[0].charge("a", 50)
    assert replicas[1].admit("a", Limits(tokens_per_minute=60)).tokens.remaining == 10
    assert not replicas[1].admit("a", Limits(tokens_per_minute=40)).admitted


@pytest.mark.fault("Redis dies while keys have limits", "each replica keeps them to these by itself, and then together")
def test_without_redis_each_replica_counts_for_itself_and_says_so_once(
    redis_server, redis_url, replicas, caplog, eventually, aftermath
):
    limits = Limits(requests_per_minute=3, tokens_per_minute=100)
    one, other = replicas
    assert one.admit("a", limits).admitted
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
    eventually(lambda: one.admit("c", limits).tokens and "over all replicas again" in caplog.text)
    one.charge("d", 100)
    eventually(lambda: not other.admit("d", limits).admitted)
    aftermath.lost, aftermath.errors = "what was counted meanwhile", "none"
    aftermath.seconds = time.monotonic() - began
