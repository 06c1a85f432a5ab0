"""Rollout pointer on disk and in a real Redis server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from osd.capture.server import RedisServer
from osd.redis_client import decoded
from osd.registry.local_storage import LocalStorage
from osd.registry.pointer import Pointer, Rollout
from tests.pointers import put
from tests.waiting import background, together

STABLE = Rollout(stable=1, canary=None, share=0.0, changed=1.5)
CANARY = Rollout(stable=1, canary=2, share=0.25, changed=2.5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of a registry with nine versions in each of two domains."""
    for domain in ("general", "code"):
        for number in range(1, 10):
            (tmp_path / domain / str(number)).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def pointer(redis_url: str, root: Path, ends: ExitStack) -> Pointer:
    return ends.enter_context(Pointer(redis_url, root))


def without_moves(rollout: Rollout | None) -> Rollout | None:
    """Return a rollout with its count of moves set to 0."""
    return None if rollout is None else msgspec.structs.replace(rollout, moves=0)


def test_pointer_returns_the_rollout_of_each_domain(pointer: Pointer):
    assert pointer.get("general") is None
    put(pointer, "general", STABLE)
    put(pointer, "code", CANARY)
    assert without_moves(pointer.get("general")) == STABLE
    assert without_moves(pointer.get("code")) == CANARY


@pytest.mark.parametrize("rollout", [
    Rollout(0, None, 0.0, 1.0), Rollout(1, 0, 0.0, 1.0), Rollout(1, 2, 1.5, 1.0), Rollout(1, 2, -0.1, 1.0),
    Rollout(10, None, 0.0, 1.0), Rollout(1, 10, 0.1, 1.0),
])  # fmt: skip
def test_pointer_refuses_an_invalid_rollout_and_keeps_the_old(pointer: Pointer, rollout: Rollout):
    before = put(pointer, "general", STABLE)
    with pytest.raises(ValueError, match=r"^rollout of general: "):
        pointer.replace("general", before, rollout)
    assert pointer.get("general") == before


@pytest.mark.parametrize("data", [b"", b"{}", b'{"stable": 0, "canary": null, "share": 0, "changed": 1}'])
def test_invalid_redis_value_is_repaired_from_disk_or_an_error(pointer, redis_client, data):
    redis_client.set("osd:rollout:general", data)
    with pytest.raises(redis.RedisError, match=r"^rollout pointer of general: "):
        pointer.get("general")
    put(pointer, "code", STABLE)
    redis_client.set("osd:rollout:code", data)
    assert without_moves(pointer.get("code")) == STABLE
    assert redis_client.get("osd:rollout:code") != data


def test_pointer_lists_domains_of_disk_and_redis(pointer: Pointer, redis_client: redis.Redis, root: Path):
    assert pointer.all() == {}
    general, code = put(pointer, "general", STABLE), put(pointer, "code", CANARY)
    assert pointer.all() == {"general": general, "code": code}
    (root / "code.rollout.json").unlink()
    assert pointer.all() == {"general": general, "code": code}
    redis_client.delete("osd:rollout:code")
    assert pointer.all() == {"general": general}


def test_replace_moves_only_an_unchanged_rollout(pointer: Pointer, redis_client: redis.Redis):
    assert pointer.replace("general", None, STABLE)
    first = pointer.get("general")
    assert not pointer.replace("general", None, CANARY)
    assert not pointer.replace("general", CANARY, CANARY)
    assert pointer.get("general") == first
    assert pointer.replace("general", first, CANARY)
    assert without_moves(pointer.get("general")) == CANARY
    # The rollout equals the first one again, but has moved since.
    assert pointer.replace("general", pointer.get("general"), STABLE)
    assert not pointer.replace("general", first, CANARY)


def test_repair_writes_a_rollout_of_redis_to_disk(pointer: Pointer, redis_client: redis.Redis):
    redis_client.set("osd:rollout:general", b'{"stable": 1, "canary": null, "share": 0.0, "changed": 1.5}')
    assert pointer.get("general") == STABLE
    assert pointer.repair("general") is not None
    redis_client.flushall()
    assert without_moves(pointer.get("general")) == STABLE


def test_pointer_survives_a_flush_and_restores_redis(pointer: Pointer, redis_client: redis.Redis):
    pinned = put(pointer, "general", msgspec.structs.replace(STABLE, pinned=True))
    redis_client.flushall()
    assert pointer.get("general") == pinned
    assert redis_client.get("osd:rollout:general") is not None
    redis_client.flushall()
    assert pointer.all() == {"general": pinned}
    assert redis_client.smembers("osd:domains") == {b"general"}


def test_outdated_redis_is_updated_from_disk(pointer: Pointer, redis_client: redis.Redis):
    put(pointer, "general", STABLE)
    old = redis_client.get("osd:rollout:general")
    moved = put(pointer, "general", CANARY)
    redis_client.set("osd:rollout:general", old)
    assert pointer.get("general") == moved
    assert redis_client.get("osd:rollout:general") != old


class OvertakenStorage(LocalStorage):
    """Storage that calls ``overtake`` once after the next move, between the file and Redis."""

    def __init__(self, root: Path, overtake: Callable[[], object]) -> None:
        super().__init__(root)
        self._overtake: Callable[[], object] | None = overtake

    @contextmanager
    def locked(self, domain: str) -> Iterator[None]:
        with super().locked(domain):
            yield
        overtake, self._overtake = self._overtake, None
        if overtake is not None:
            overtake()


def announced(client: redis.Redis) -> Rollout:
    """Return the rollout of ``general`` in Redis."""
    return msgspec.json.decode(client.get("osd:rollout:general"), type=Rollout)


def test_slow_mover_never_takes_redis_back(redis_url: str, pointer: Pointer, redis_client: redis.Redis, root: Path):
    storage = OvertakenStorage(root, lambda: put(pointer, "general", CANARY))
    with Pointer(redis_url, storage) as slow:
        assert slow.replace("general", None, STABLE)
    assert without_moves(announced(redis_client)) == CANARY


def test_announcement_that_is_overtaken_changes_nothing(redis_url, pointer, redis_client, root, monkeypatch):
    before = put(pointer, "general", STABLE)
    decodings = 0

    def decode(*arguments: Any) -> Any:
        nonlocal decodings
        decodings += 1
        if decodings == 2:  # the first reads the pointer, and the second compares it within the announcement
            put(pointer, "general", CANARY)
        return decoded(*arguments)

    with Pointer(redis_url, root) as slow:
        monkeypatch.setattr("osd.registry.pointer.decoded", decode)
        assert slow.replace("general", before, STABLE)
    assert without_moves(announced(redis_client)) == CANARY


def test_newer_rollout_in_redis_wins_over_a_stale_disk(pointer: Pointer, root: Path):
    before = put(pointer, "general", STABLE)
    late = (root / "general.rollout.json").read_bytes()
    moved = put(pointer, "general", CANARY)
    (root / "general.rollout.json").write_bytes(late)
    assert pointer.get("general") == moved
    assert not pointer.replace("general", before, STABLE)


def test_damaged_pointer_file_counts_as_missing_and_logs_once(pointer, root, caplog):
    moved = put(pointer, "general", CANARY)
    (root / "general.rollout.json").write_bytes(b"{")
    assert pointer.get("general") == pointer.get("general") == moved
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        f"{root / 'general.rollout.json'} is damaged and is treated as missing"
    ]
    assert pointer.replace("general", moved, STABLE)
    assert b'"stable":1' in (root / "general.rollout.json").read_bytes()


def test_concurrent_moves_of_the_pointer_lose_no_update(redis_url: str, root: Path):
    each = 20

    def move(_: int) -> None:
        with Pointer(redis_url, root) as pointer:
            done = 0
            while done < each:
                before = pointer.get("general")
                done += pointer.replace("general", before, Rollout(1, None, 0.0, (before.changed if before else 0) + 1))

    together(move, range(4))
    with Pointer(redis_url, root) as pointer:
        rollout = pointer.get("general")
    assert (rollout.moves, rollout.changed) == (4 * each, 4 * each)


def test_pointer_refuses_an_invalid_domain_name(pointer: Pointer):
    with pytest.raises(ValueError, match=r"^domain "):
        pointer.get("a b")


@pytest.mark.fault(
    "Redis is down while a version is promoted or pinned",
    "the pointer on disk is read and moved",
    process="redis-server: SIGTERM",
)
def test_pointer_without_redis_reads_and_moves_the_disk(redis_server: RedisServer, pointer: Pointer):
    put(pointer, "general", STABLE)
    redis_server.close()
    with pytest.raises(redis.RedisError):
        pointer.get("code")
    with pytest.raises(redis.RedisError):
        pointer.replace("code", None, STABLE)
    assert without_moves(pointer.get("general")) == STABLE
    moved = put(pointer, "general", CANARY)
    assert pointer.all() == {"general": moved}


@contextmanager
def watching(url: str, storage: Path | LocalStorage, interval: float = 0.01) -> Iterator[list[Rollout]]:
    """Watch the pointer of a domain in the background and collect its moves in a list."""
    stop, seen = threading.Event(), list[Rollout]()

    def follow() -> None:
        with Pointer(url, storage) as pointer:
            seen.extend(without_moves(rollout) for rollout in pointer.watch("general", stop, interval=interval))

    with background(follow, stop.set):
        yield seen


def test_watch_yields_each_change_once_across_a_redis_restart(redis_server, pointer, root, eventually):
    with watching(redis_server.url, root) as seen:
        put(pointer, "general", STABLE)
        eventually(lambda: seen == [STABLE])
        put(pointer, "general", CANARY)
        eventually(lambda: seen == [STABLE, CANARY])
        redis_server.close()
        time.sleep(0.05)
        redis_server.start()
        time.sleep(0.05)
        assert seen == [STABLE, CANARY]
        put(pointer, "general", STABLE)
        eventually(lambda: seen == [STABLE, CANARY, STABLE])


class CountedStorage(LocalStorage):
    """Storage with patience that counts its reads."""

    patience = 30.0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = 0

    def read(self, name: str) -> bytes:
        self.reads += 1
        return super().read(name)


def test_pointer_watch_polls_when_redis_is_down(redis_server: RedisServer, pointer: Pointer, root: Path, eventually):
    storage = CountedStorage(root)
    put(pointer, "general", STABLE)
    with watching(redis_server.url, storage) as seen:
        eventually(lambda: seen == [STABLE])
        put(pointer, "general", CANARY)
        eventually(lambda: seen == [STABLE, CANARY])
        assert storage.reads == 1
        redis_server.close()
        put(pointer, "general", STABLE)
        eventually(lambda: seen == [STABLE, CANARY, STABLE])


def test_watch_waits_for_redis_and_ends_its_subscription(redis_url, root, pointer, redis_client, eventually):
    def get_calls() -> int:
        return redis_client.info("commandstats")["cmdstat_get"]["calls"]

    put(pointer, "general", STABLE)
    with watching(redis_url, root, interval=600.0) as seen:
        eventually(lambda: len(seen) == 1 and redis_client.pubsub_numsub("osd:rollouts")[0][1] == 1)
        time.sleep(0.2)  # the watcher reads once more after it subscribes
        before = get_calls()
        time.sleep(0.3)
        assert get_calls() - before <= 1, "the watcher polls every few seconds"
        put(pointer, "general", CANARY)
        eventually(lambda: len(seen) == 2)
    eventually(lambda: redis_client.pubsub_numsub("osd:rollouts")[0][1] == 0)
