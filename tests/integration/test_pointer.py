"""The rollout pointer in a real Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from osd.capture.server import RedisServer
from osd.registry.pointer import Pointer, Rollout

STABLE = Rollout(stable=1, canary=None, share=0.0, changed=1.5)
CANARY = Rollout(stable=1, canary=2, share=0.25, changed=2.5)


@pytest.fixture
def pointer(redis_url: str) -> Iterator[Pointer]:
    made = Pointer(redis_url)
    yield made
    made.close()


def test_domain_without_a_rollout_has_none(pointer: Pointer):
    assert pointer.get("general") is None


def test_rollout_that_was_set_is_read_per_domain(pointer: Pointer):
    pointer.set("general", STABLE)
    pointer.set("code", CANARY)
    assert pointer.get("general") == STABLE
    assert pointer.get("code") == CANARY


@pytest.mark.parametrize(
    "rollout", [Rollout(0, None, 0.0, 1.0), Rollout(1, 0, 0.0, 1.0), Rollout(1, 2, 1.5, 1.0), Rollout(1, 2, -0.1, 1.0)]
)
def test_rollout_out_of_range_is_refused_and_the_old_one_stays(pointer: Pointer, rollout: Rollout):
    pointer.set("general", STABLE)
    with pytest.raises(ValueError, match=r"^rollout of general: "):
        pointer.set("general", rollout)
    assert pointer.get("general") == STABLE


@pytest.mark.parametrize("data", [b"", b"{}", b'{"stable": 0, "canary": null, "share": 0, "changed": 1}'])
def test_anything_else_under_the_key_is_an_error_of_redis(pointer: Pointer, redis_client: redis.Redis, data: bytes):
    redis_client.set("osd:rollout:general", data)
    with pytest.raises(redis.RedisError, match=r"^rollout pointer of general: "):
        pointer.get("general")


def test_all_domains_that_have_a_rollout_are_found(pointer: Pointer, redis_client: redis.Redis):
    assert pointer.all() == {}
    pointer.set("general", STABLE)
    assert pointer.replace("code", None, CANARY)
    pointer.set("general", CANARY)
    assert pointer.all() == {"general": CANARY, "code": CANARY}
    redis_client.delete("osd:rollout:code")
    assert pointer.all() == {"general": CANARY}


def test_a_rollout_is_replaced_only_while_it_is_what_it_was(pointer: Pointer, redis_client: redis.Redis):
    assert pointer.replace("general", None, STABLE)
    assert not pointer.replace("general", None, CANARY)
    assert not pointer.replace("general", CANARY, CANARY)
    assert pointer.get("general") == STABLE
    assert pointer.replace("general", STABLE, CANARY)
    assert pointer.get("general") == CANARY
    # As an earlier osd wrote it.
    redis_client.set("osd:rollout:general", b'{"stable": 1, "canary": null, "share": 0.0, "changed": 1.5}')
    assert pointer.replace("general", STABLE, CANARY)


def test_a_rollout_that_moves_in_the_middle_of_a_replacement_stays(
    pointer: Pointer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    pointer.set("general", STABLE)
    execute = redis.client.Pipeline.execute

    def meanwhile(pipe: redis.client.Pipeline) -> object:
        redis_client.set("osd:rollout:general", b'{"stable": 7, "canary": null, "share": 0.0, "changed": 9}')
        return execute(pipe)

    monkeypatch.setattr(redis.client.Pipeline, "execute", meanwhile)
    assert not pointer.replace("general", STABLE, CANARY)
    monkeypatch.undo()
    now = pointer.get("general")
    assert now is not None
    assert now.stable == 7


def test_domain_that_is_not_a_name_is_refused(pointer: Pointer):
    with pytest.raises(ValueError, match=r"^domain "):
        pointer.get("a b")


def test_redis_gone_raises_soon(redis_server: RedisServer, pointer: Pointer):
    redis_server.close()
    started = time.monotonic()
    with pytest.raises(redis.RedisError):
        pointer.get("general")
    with pytest.raises(redis.RedisError):
        pointer.set("general", STABLE)
    assert time.monotonic() - started < 2.0


def test_watch_yields_each_change_once_and_outlives_a_restart_of_redis(
    redis_server: RedisServer, pointer: Pointer, eventually
):
    stop, seen = threading.Event(), []

    def follow() -> None:
        for rollout in pointer.watch("general", stop, interval=0.01):
            seen.append(rollout)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        pointer.set("general", STABLE)
        eventually(lambda: seen == [STABLE])
        pointer.set("general", STABLE)
        pointer.set("general", CANARY)
        eventually(lambda: seen == [STABLE, CANARY])
        redis_server.close()
        time.sleep(0.05)
        redis_server.start()
        time.sleep(0.05)
        assert seen == [STABLE, CANARY]
        pointer.set("general", STABLE)
        eventually(lambda: seen == [STABLE, CANARY, STABLE])
    finally:
        stop.set()
        thread.join(5)
    assert not thread.is_alive()
