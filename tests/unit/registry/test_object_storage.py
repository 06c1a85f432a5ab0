"""Registry in an object store: versions, pointers, locks, cache and deltas."""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import numpy as np
import pytest
import torch
from botocore.exceptions import EndpointConnectionError

from deploy.contradictions import check_settings
from osd.config import ConfigError, Settings, load_settings
from osd.registry import delta, object_storage
from osd.registry.file_cache import FileCache
from osd.registry.lease import Lease
from osd.registry.object_storage import ObjectStorage, storage_of
from osd.registry.pointer_file import FencedError, PointerFiles, Rollout
from osd.registry.retention import retire
from osd.registry.storage import MANIFEST, ReadCache
from osd.registry.versions import Registry, VersionError
from tests.clocks import Clock
from tests.object_store import ObjectStore, object_store
from tests.pointers import write
from tests.waiting import together

FIRST, SECOND = Rollout(1, None, 0.0, 1.0), Rollout(2, None, 0.0, 2.0)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def url(store: ObjectStore) -> str:
    return f"s3://{store.bucket()}/drafters"


@pytest.fixture
def storage(url: str, tmp_path: Path) -> ObjectStorage:
    return ObjectStorage(url, tmp_path / "node", 3)


@pytest.fixture
def registry(storage: ObjectStorage) -> Registry:
    return Registry(storage)


class Client:
    """Client of the store with some methods replaced by those of a test."""

    def __init__(self, storage: ObjectStorage, **methods: Callable[..., Any]) -> None:
        self.real, self.methods = storage.client, methods
        storage.client = self

    def __getattr__(self, name: str) -> Any:
        return self.methods.get(name) or getattr(self.real, name)


def files(storage: ObjectStorage, folder: str = "general") -> list[str]:
    """Return the paths of the files below a folder of the registry."""
    (bucket, _, prefix) = storage.address("").removeprefix("s3://").partition("/")
    answer = storage.client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}{folder}/")
    return sorted(entry["Key"].removeprefix(prefix) for entry in answer.get("Contents", []))


def publish(registry: Registry, value: float = 1.0, parent: int | None = None) -> int:
    return registry.publish("general", {"w": torch.full((3,), value)}, {"kind": "eagle"}, {"parent": parent})


def value(registry: Registry, number: int) -> float:
    return float(registry.load("general", number).weights["w"][0])


def test_published_version_is_listed_and_loaded_on_every_node(registry: Registry, url: str, tmp_path: Path):
    assert [publish(registry, 1.0), publish(registry, 2.0, parent=1)] == [1, 2]
    other = Registry(ObjectStorage(url, tmp_path / "other", 3))
    assert other.domains() == ["general"]
    assert [(info.number, info.manifest["parent"]) for info in other.list("general")] == [(1, None), (2, 1)]
    assert [value(other, 1), value(other, 2)] == [1.0, 2.0]
    with pytest.raises(VersionError, match=r"^there is no drafter version general/3$"):
        other.load("general", 3)


def test_publish_onto_a_taken_number_uses_the_next_number(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    assert publish(registry, 1.0) == 1
    # A publisher may have listed the store before another publisher finished.
    monkeypatch.setattr(ObjectStorage, "numbers", lambda self, domain: [])
    assert publish(registry, 2.0) == 2
    monkeypatch.undo()
    assert [value(registry, 1), value(registry, 2)] == [1.0, 2.0]


def test_concurrent_publishers_get_distinct_numbers(registry: Registry):
    published: list[tuple[float, int]] = []
    together(lambda weight: published.append((float(weight), publish(registry, float(weight)))), range(4))
    assert sorted(number for _, number in published) == registry.numbers("general") == [1, 2, 3, 4]
    assert all(value(registry, number) == weight for weight, number in published)


def test_incomplete_publish_is_hidden_and_deleted_when_old(registry, storage, monkeypatch):
    publish(registry)

    def killed(**given: Any) -> Any:
        if given["Key"].endswith(MANIFEST):
            raise KeyboardInterrupt
        return client.real.put_object(**given)

    client = Client(storage, put_object=killed)
    with pytest.raises(KeyboardInterrupt):
        publish(registry, 2.0)
    client.methods.clear()
    assert registry.numbers("general") == [1]
    assert folders(storage) == 2
    publish(registry, 3.0, parent=1)
    publish(registry, 4.0, parent=2)
    storage.delete("general", [])
    assert folders(storage) == 4, "another process may be publishing it"
    monkeypatch.setattr(object_storage, "ORPHAN_SECONDS", -1.0)
    storage.delete("general", [])
    assert folders(storage) == 3
    assert [value(registry, number) for number in registry.numbers("general")] == [1.0, 3.0, 4.0]


def folders(storage: ObjectStorage) -> int:
    """Return the number of folders of version files, with or without a manifest."""
    return len({name.split("/")[1] for name in files(storage) if "/." in name})


def test_retired_versions_are_deleted_and_recorded(registry: Registry, storage: ObjectStorage):
    for parent in (None, 1, 2, 3):
        publish(registry, parent=parent)
    write(PointerFiles(storage), "general", Rollout(4, None, 0.0, 1.0))
    assert retire(registry, "general", 1, PointerFiles(storage).locked("general")) == [3, 4]
    assert registry.numbers("general") == [3, 4]
    assert folders(storage) == 2
    assert [version.number for version in registry.removed("general")] == [1, 2]


def test_unfinished_intention_is_returned_until_finished(registry: Registry):
    assert registry.unfinished("general") is None
    token = registry.begin("general", {"parent": 1})
    number = registry.publish("general", {"w": torch.ones(1)}, {}, {"attempt": token})
    assert registry.unfinished("general")[1] == number
    registry.finish("general")
    assert registry.unfinished("general") is None


def test_swap_writes_only_if_the_content_is_unchanged(storage: ObjectStorage):
    assert storage.swap("a", None, b"1")
    assert not storage.swap("a", None, b"2"), "the file exists"
    assert not storage.swap("a", b"0", b"2"), "the content differs"
    assert storage.swap("a", b"1", b"2")
    assert not storage.swap("b", b"1", b"2"), "the file is missing"
    assert storage.read("a") == b"2"


def test_update_repeats_after_a_concurrent_move(storage: ObjectStorage):
    pointers = PointerFiles(storage)
    write(pointers, "general", FIRST)
    stale, seen = [True], []

    def get_before_a_move(**given: Any) -> Any:
        answer = client.real.get_object(**given)
        if given["Key"].endswith("general.rollout.json") and stale and seen:
            stale.clear()
            data = answer["Body"].read()
            storage.replace("general.rollout.json", data.replace(b'"moves":0', b'"moves":7'))
            answer["Body"] = io.BytesIO(data)
        return answer

    def change(now: Rollout | None) -> Rollout | None:
        seen.append(now)
        return Rollout(2, None, 0.0, 2.0, moves=now.moves + 1)

    client = Client(storage, get_object=get_before_a_move)
    moved = pointers.update("general", change)
    assert [rollout.moves for rollout in seen] == [0, 7]
    assert pointers.read("general") == moved == Rollout(2, None, 0.0, 2.0, moves=8)


def test_repeated_write_after_a_lost_answer_succeeds(storage: ObjectStorage):
    def put_twice(**given: Any) -> Any:
        client.real.put_object(**given)
        return client.real.put_object(**given)

    client = Client(storage, put_object=put_twice)
    assert storage.swap("a", None, b"1")
    assert storage.swap("a", b"1", b"2")
    assert publish(Registry(storage)) == 1


def test_concurrent_updates_are_applied_one_by_one(storage: ObjectStorage):
    files = PointerFiles(storage)
    write(files, "general", FIRST)

    def count(_: int) -> None:
        for _ in range(3):
            files.update("general", lambda now: Rollout(1, None, 0.0, 1.0, moves=(now or FIRST).moves + 1))

    together(count, range(3))
    assert files.read("general") == Rollout(1, None, 0.0, 1.0, moves=9)


def test_lock_is_taken_only_from_a_silent_holder(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_storage, "WAIT_SECONDS", 0.2)
    with storage.locked("general"):
        with pytest.raises(OSError, match="held by another process"), storage.locked("general"):
            pass
        monkeypatch.setattr(object_storage, "SILENT_SECONDS", -1.0)
        with storage.locked("general"):
            pass
    with storage.locked("general"):
        pass


def test_trainer_replaced_by_another_node_cannot_write(url: str, tmp_path: Path):
    """Nodes without a shared folder do not see each other's locks, so the fence in the store decides."""
    first, second = (
        Lease(PointerFiles(ObjectStorage(url, tmp_path / node, 3)), "general") for node in ("first", "second")
    )
    assert first.take(FIRST)
    with first.held():
        pass
    assert second.take(FIRST)
    with pytest.raises(FencedError), first.held():
        pass
    first.release()
    second.release()


def test_load_uses_the_cache_when_the_store_is_down(registry: Registry, storage: ObjectStorage):
    publish(registry, 1.0)
    publish(registry, 2.0)
    assert value(registry, 1) == 1.0

    def unavailable(**_given: object) -> None:
        raise EndpointConnectionError(endpoint_url="http://store")

    Client(storage, get_object=unavailable, head_object=unavailable, list_objects_v2=unavailable)
    assert value(registry, 1) == 1.0
    with pytest.raises(VersionError, match=r"^general/2: cannot read manifest.json \(registry.url [^\n]* not answer: "):
        registry.load("general", 2)


def test_load_with_a_damaged_cache_reads_the_store(registry: Registry, tmp_path: Path):
    publish(registry, 1.0)
    assert value(registry, 1) == 1.0
    for file in (tmp_path / "node").glob(".cache-*/*"):
        if file.suffix != ".json":
            file.write_bytes(b"damaged")
    assert value(registry, 1) == 1.0


class Reads:
    """Names of all files read from the store, in order and with repetitions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        create = botocore.session.Session.create_client

        def counted(session: Any, *given: Any, **more: Any) -> Any:
            client = create(session, *given, **more)
            client.meta.events.register("provide-client-params.s3.GetObject", self._read)
            return client

        monkeypatch.setattr(botocore.session.Session, "create_client", counted)

    def _read(self, params: dict[str, Any], **_more: object) -> None:
        self.names.append(params["Key"].rpartition("/")[2])

    def of_weights(self) -> list[str]:
        return [name for name in self.names if name.startswith("model.safetensors")]


def large(registry: Registry, value: float) -> int:
    return registry.publish("general", {"w": torch.arange(5000) * 0.01 + value}, {"kind": "eagle"}, {})


def test_load_with_the_previous_version_reads_only_the_delta(registry, url, tmp_path, monkeypatch):
    large(registry, 1.0)
    reads = Reads(monkeypatch)
    other = Registry(ObjectStorage(url, tmp_path / "other", 3))
    other.load("general", 1)
    large(registry, 1.0001)
    reads.names.clear()
    loaded = other.load("general", 2).weights["w"]
    assert torch.equal(loaded, torch.arange(5000) * 0.01 + 1.0001)
    assert [name.partition(".from-")[0] for name in reads.of_weights()] == ["model.safetensors"]
    assert ".from-" in reads.of_weights()[0]
    third = Registry(ObjectStorage(url, tmp_path / "third", 3))
    assert torch.equal(third.load("general", 2).weights["w"], loaded)
    assert reads.of_weights()[1:] == ["model.safetensors"]


def test_publish_stores_no_delta_that_saves_little(registry: Registry, storage: ObjectStorage):
    publish(registry, 1.0)
    for seed in (1, 2):  # unlike the earlier weights, and the first one of another size
        noise = torch.randint(256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        registry.publish("general", {"w": noise}, {"kind": "eagle"}, {})
    for number in (2, 3):
        assert storage.has("general", number)
    assert not [name for name in files(storage) if ".from-" in name]


@pytest.mark.parametrize("damage", [b"damaged", delta.encode(b"x" * 20136, b"y" * 20136)])
def test_load_with_a_damaged_delta_reads_the_whole_weights(damage, registry, storage, url, tmp_path, caplog):
    large(registry, 1.0)
    other = Registry(ObjectStorage(url, tmp_path / "other", 3))
    other.load("general", 1)
    large(registry, 1.0001)
    [name] = [name for name in files(storage) if ".from-" in name]
    storage.replace(name, damage)
    assert torch.equal(other.load("general", 2).weights["w"], torch.arange(5000) * 0.01 + 1.0001)
    assert "the delta of version 2 of general is damaged; reading the whole weights" in caplog.text


def test_processes_of_a_machine_read_a_version_once(registry, url, tmp_path, monkeypatch):
    large(registry, 1.0)
    reads = Reads(monkeypatch)
    loaded: list[float] = []

    def load(_: int) -> None:
        replica = Registry(ObjectStorage(url, tmp_path / "other", 3))
        loaded.append(float(replica.load("general", 1).weights["w"][0]))

    together(load, range(8))
    assert loaded == [1.0] * 8
    assert sorted(reads.names) == ["config.json", "manifest.json", "model.safetensors"]
    assert not list((tmp_path / "other").glob(".cache-*/.lock-*"))


def test_file_cache_keeps_the_most_recently_used_files(tmp_path: Path):
    cache = FileCache(tmp_path / "cache", 2)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "deleted").symlink_to(
        "nowhere"
    )  # like a file that another process deletes during the listing
    for number, name in enumerate(("a", "b", "c")):
        cache.put(name, name.encode())
        os.utime(tmp_path / "cache" / name, (number + 1, number + 1))
    assert [cache.get(name) for name in ("a", "b", "c")] == [None, b"b", b"c"]


def settings_at(url: str, home: Path) -> Settings:
    return load_settings(None, [f"registry.url={url}", f"home={home}"], {})


def test_missing_bucket_is_named(store: ObjectStore, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^registry.url s3://nowhere/x: there is no bucket nowhere$"):
        check_settings(settings_at("s3://nowhere/x", tmp_path))


def test_missing_credentials_are_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match=r"^registry.url [^\n]*: there are no credentials; set AWS_ACCESS_KEY_ID"):
        check_settings(settings_at(url, tmp_path))


def test_missing_botocore_names_the_package_to_install(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(ConfigError, match=r"packages that are not installed: pip install 'osd-llm\[s3\]'$"):
        check_settings(settings_at(url, tmp_path))


@pytest.mark.parametrize("bad", ["gs://bucket", "s3://", "s3://B", "bucket"])
def test_registry_url_that_is_not_s3_is_refused(bad: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"registry\.url"):
        settings_at(bad, tmp_path)


def test_settings_choose_the_storage(tmp_path: Path):
    assert isinstance(storage_of(settings_at("s3://bucket/x", tmp_path)), ObjectStorage)
    assert storage_of(load_settings(None, [f"home={tmp_path}"], {})).local == tmp_path / "registry"


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4096, 4099])
def test_delta_restores_data_of_any_size(size: int):
    chance = np.random.default_rng(size)
    data, base = chance.bytes(size), chance.bytes(size)
    assert delta.decode(delta.encode(data, base), base) == data


def test_delta_of_slightly_changed_numbers_is_small():
    base = np.random.default_rng(1).bytes(40_000)
    data = bytearray(base)
    data[::4] = np.random.default_rng(2).bytes(10_000)
    assert len(delta.encode(bytes(data), base)) < 0.3 * len(base)


def test_delta_with_a_wrong_base_gives_wrong_data():
    assert delta.decode(delta.encode(b"abcdefgh", b"abcdabcd"), b"abcdabce") != b"abcdefgh"


def test_delta_of_data_with_another_size_is_refused():
    with pytest.raises(ValueError, match="8 bytes do not fit a base of 4 bytes"):
        delta.encode(b"abcdefgh", b"abcd")


@pytest.mark.parametrize(
    "bad", [b"", b"no delta", delta.encode(bytes(4), bytes(4)), delta.encode(bytes(12), bytes(12))]
)
def test_bytes_that_are_not_a_delta_of_the_base_are_refused(bad: bytes):
    with pytest.raises(ValueError, match=r"delta|do not fit a base"):
        delta.decode(bad, bytes(8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def test_read_cache_expires_between_half_and_full_lifetime(clock: Clock):
    numbers = itertools.count()
    values = ReadCache(30.0)
    assert [values.get("a", lambda: next(numbers)) for _ in range(3)] == [0, 0, 0]
    clock.now += 14.9
    assert values.get("a", lambda: next(numbers)) == 0
    clock.now += 15.1
    assert values.get("a", lambda: next(numbers)) == 1


def test_read_cache_separates_names_and_needs_a_lifetime(clock: Clock):
    values = ReadCache(30.0)
    assert (values.get("a", lambda: 1), values.get("b", lambda: 2)) == (1, 2)
    assert [ReadCache(0.0).get("a", lambda n=n: n) for n in (1, 2)] == [1, 2]


def test_doubted_value_is_valid_for_two_seconds(clock: Clock):
    values = ReadCache(30.0)
    values.get("a", lambda: 1)
    clock.now += 1.9
    values.doubt()
    assert values.get("a", lambda: 2) == 1
    clock.now += 0.2
    assert values.get("a", lambda: 2) == 2


def test_read_cache_stores_no_failed_read(clock: Clock):
    values = ReadCache(30.0)
    with pytest.raises(OSError, match="store is down"):
        values.get("a", unavailable)
    assert values.get("a", lambda: 1) == 1


def unavailable() -> int:
    raise OSError("store is down")
