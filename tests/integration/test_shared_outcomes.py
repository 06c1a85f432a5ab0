"""Replicas with drafters of two domains, on a real Redis: what one learns about them, the other knows."""

from __future__ import annotations

import time

import pytest

from deploy.preparation import ensure_version
from osd.config import CaptureSettings, Settings
from osd.routing.outcome_stream import STREAM
from tests import replicas as whole
from tests.command import here
from tests.replicas import Replicas


@pytest.fixture
def settings(tiny_target, tmp_path, redis_url):
    made = Settings(
        home=tmp_path,
        target={"source": str(tiny_target), "dtype": "float32"},
        drafter={"kind": "eagle", "vocabulary": 64},
        growth={"kind": "chain", "governed": False},
        engine={"slots": 2, "context": 256, "threads": 1},
        serving={"replicas": 2},
        trainer={"extra_domains": ("code",)},
    )
    ensure_version(made, redis_url, tiny_target)
    return made


@pytest.fixture
def start(settings, redis_url, eventually):
    with Replicas(settings, redis_url) as replicas:

        def start(name):
            replica = replicas.start(name)
            eventually(lambda: "code" in replica.engine.pool.domains)
            return replica

        yield start


def decode(replica, name, **given):
    """Decode a request that does not say its domain."""
    return whole.decode(replica, name, domain=None, **given)


def evidence(replica):
    """For how many requests it knows how fast a drafter was."""
    return sum(arm.weight for arm in replica.engine.loop.router.routers[""].bandit.everywhere.values())


def heard(replica):
    return len(replica.engine.loop.router.heard)


def test_a_replica_knows_what_another_learnt_and_so_does_one_that_comes_later(start, eventually):
    one, other = start("one"), start("other")
    for number in range(3):
        decode(one, f"request-{number}")()
    eventually(lambda: heard(other) == 3)
    later = start("later")
    eventually(lambda: heard(later) == 3)
    assert heard(one) == 0, "it does not hear itself"
    for replica in (other, later):
        decode(replica, f"request-of-{id(replica)}")()
        eventually(lambda replica=replica: evidence(replica) > 3.5)


def test_what_may_not_be_captured_is_not_told(start, redis_client, eventually):
    one = start("one")
    decode(one, "request-0", capture=False)()
    decode(one, "request-1")()
    eventually(lambda: evidence(one) > 1.5)
    eventually(lambda: redis_client.xlen(STREAM) == 1)


def test_a_purged_request_is_forgotten_there_too(start, settings, redis_url, redis_client, eventually):
    one = start("one")
    for number in (1, 2):
        decode(one, f"chatcmpl-{number}f-0")()
    eventually(lambda: redis_client.xlen(STREAM) == 2)
    result = here("traces", "purge", "--request", "chatcmpl-1f", home=settings.home, redis_url=redis_url)
    assert result.exit_code == 0, result.output
    assert redis_client.xlen(STREAM) == 1


def test_what_is_older_than_may_be_kept_is_deleted(settings, redis_url, redis_client, eventually):
    old = int(1000 * (time.time() - 2 * 86_400))
    redis_client.xadd(STREAM, {"outcome": b""}, id=f"{old}-0")
    redis_client.xadd(STREAM, {"outcome": b""})
    with Replicas(settings, redis_url) as replicas:
        replicas.start("one", capture=CaptureSettings(keep_days=1))
        eventually(lambda: redis_client.xlen(STREAM) == 1)


def test_the_stream_holds_a_bounded_number_and_what_is_broken_on_it_is_left_out(start, redis_client, eventually):
    redis_client.xadd(STREAM, {"outcome": b"is none"})
    one, other = start("one"), start("other")
    for number in range(2000):
        redis_client.xadd(STREAM, {"a": number})
    decode(one, "request-0")()
    eventually(lambda: heard(other) == 1)
    assert redis_client.xlen(STREAM) == 512


def test_without_redis_each_learns_by_itself(start, redis_server, eventually):
    one = start("one")
    redis_server.close()
    decode(one, "request-0")()
    eventually(lambda: evidence(one) == 1)
