"""Routing outcomes that replicas share through a real Redis."""

from __future__ import annotations

import time

import pytest

from deploy.preparation import ensure_version
from osd.config import CaptureSettings, Settings
from osd.routing.outcome_stream import STREAM
from tests import replicas as replica_helpers
from tests.command import purge
from tests.replicas import Replicas, blocked_request


@pytest.fixture
def settings(tiny_target, tmp_path, redis_url):
    settings = Settings(
        home=tmp_path,
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "eagle", "vocabulary": 64},
        growth={"kind": "chain", "governed": False},
        engine={"slots": 2, "context": 256, "threads": 1},
        serving={"replicas": 2},
        trainer={"extra_domains": ("code",)},
    )
    ensure_version(settings, redis_url, tiny_target)
    return settings


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch):
    for name in ("domain_watcher.POLL_SECONDS", "outcome_sharer._POLL_SECONDS", "recall_keeper._POLL_SECONDS"):
        monkeypatch.setattr(f"serving.replica.{name}", 0.05)


@pytest.fixture
def start(settings, redis_url, eventually):
    with Replicas(settings, redis_url) as replicas:

        def start(name):
            replica = replicas.start(name)
            eventually(lambda: "code" in replica.engine.pool.domains)
            return replica

        yield start


def decode(replica, name, **options):
    """Decode a request without a domain."""
    return replica_helpers.decode(replica, name, domain=None, **options)


def evidence(replica):
    """Return the number of requests whose outcome the router of a replica knows."""
    return sum(arm.weight for arm in replica.engine.loop.router.routers[""].bandit.everywhere.values())


def received(replica):
    return len(replica.engine.loop.router.incoming)


def test_replicas_share_routing_outcomes(start, eventually):
    first, second = start("first"), start("second")
    for number in range(3):
        decode(first, f"request-{number}")()
    eventually(lambda: received(second) == 3)
    later = start("later")
    eventually(lambda: received(later) == 3)
    assert received(first) == 0, "it skips its own outcomes"
    for replica in (second, later):
        decode(replica, f"request-of-{id(replica)}")()
        eventually(lambda replica=replica: evidence(replica) > 3.5)


def test_uncaptured_request_gives_no_shared_outcome(start, redis_client, eventually):
    first = start("first")
    decode(first, "request-0", capture=False)()
    decode(first, "request-1")()
    eventually(lambda: evidence(first) > 1.5)
    eventually(lambda: redis_client.xlen(STREAM) == 1)


def test_purge_deletes_the_shared_outcome(start, settings, redis_url, redis_client, eventually):
    first = start("first")
    for number in (1, 2):
        decode(first, f"chatcmpl-{number}f-0")()
    eventually(lambda: redis_client.xlen(STREAM) == 2)
    purge("chatcmpl-1f", settings.home, redis_url)
    assert redis_client.xlen(STREAM) == 1


def test_request_purged_while_it_runs_gives_no_shared_outcome(start, settings, redis_url, redis_client, eventually):
    first = start("first")
    with blocked_request(first, "chatcmpl-1f-0", domain=None):
        purge("chatcmpl-1f", settings.home, redis_url, codes=(0, 2))  # 2 if nothing of it was stored yet
    decode(first, "request-1")()
    eventually(lambda: evidence(first) > 1.5)
    eventually(lambda: redis_client.xlen(STREAM) == 1)


def test_expired_outcomes_are_deleted(settings, redis_url, redis_client, eventually):
    old = int(1000 * (time.time() - 2 * 86_400))
    redis_client.xadd(STREAM, {"outcome": b""}, id=f"{old}-0")
    redis_client.xadd(STREAM, {"outcome": b""})
    with Replicas(settings, redis_url) as replicas:
        replicas.start("first", capture=CaptureSettings(keep_days=1))
        eventually(lambda: redis_client.xlen(STREAM) == 1)


def test_outcome_stream_is_bounded_and_skips_invalid_entries(start, redis_client, eventually):
    redis_client.xadd(STREAM, {"outcome": b"invalid"})
    first, second = start("first"), start("second")
    for number in range(2000):
        redis_client.xadd(STREAM, {"a": number})
    decode(first, "request-0")()
    eventually(lambda: received(second) == 1)
    assert redis_client.xlen(STREAM) == 512


def test_router_without_redis_learns_alone(start, redis_server, eventually):
    first = start("first")
    redis_server.close()
    decode(first, "request-0")()
    eventually(lambda: evidence(first) == 1)
