"""A registry in an object store keeps what one in a folder keeps."""

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
    with object_store() as found:
        yield found


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
    """The store's client; methods that a test gives answer in the place of its own."""

    def __init__(self, storage: ObjectStorage, **methods: Callable[..., Any]) -> None:
        self.real, self.methods = storage.client, methods
        storage.client = self

    def __getattr__(self, name: str) -> Any:
        return self.methods.get(name) or getattr(self.real, name)


def files(storage: ObjectStorage, folder: str = "general") -> list[str]:
    """The paths of the files below a folder of the registry."""
    (bucket, _, prefix) = storage.where("").removeprefix("s3://").partition("/")
    answer = storage.client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}{folder}/")
    return sorted(one["Key"].removeprefix(prefix) for one in answer.get("Contents", []))


def publish(registry: Registry, value: float = 1.0, parent: int | None = None) -> int:
    return registry.publish("general", {"w": torch.full((3,), value)}, {"kind": "eagle"}, {"parent": parent})


def value(registry: Registry, number: int) -> float:
    return float(registry.load("general", number).weights["w"][0])


def test_what_is_published_is_listed_and_loaded_on_every_node(registry: Registry, url: str, tmp_path: Path):
    assert [publish(registry, 1.0), publish(registry, 2.0, parent=1)] == [1, 2]
    other = Registry(ObjectStorage(url, tmp_path / "other", 3))
    assert other.domains() == ["general"]
    assert [(info.number, info.manifest["parent"]) for info in other.list("general")] == [(1, None), (2, 1)]
    assert [value(other, 1), value(other, 2)] == [1.0, 2.0]
    with pytest.raises(VersionError, match=r"^general/3: no such drafter version$"):
        other.load("general", 3)


def test_two_publishers_of_one_number_both_keep_theirs(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    assert publish(registry, 1.0) == 1
    # As seen by a publisher that listed the store before the other one was done.
    monkeypatch.setattr(ObjectStorage, "numbers", lambda self, domain: [])
    assert publish(registry, 2.0) == 2
    monkeypatch.undo()
    assert [value(registry, 1), value(registry, 2)] == [1.0, 2.0]


def test_publishers_that_race_get_numbers_of_their_own(registry: Registry):
    found: list[tuple[float, int]] = []
    together(lambda mine: found.append((float(mine), publish(registry, float(mine)))), range(4))
    assert sorted(number for _, number in found) == registry.numbers("general") == [1, 2, 3, 4]
    assert all(value(registry, number) == mine for mine, number in found)


def test_a_torn_publish_is_never_seen_and_goes_when_it_is_old(
    registry: Registry, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
):
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
    assert folders(storage) == 4, "somebody may be publishing it"
    monkeypatch.setattr(object_storage, "ORPHAN_SECONDS", -1.0)
    storage.delete("general", [])
    assert folders(storage) == 3
    assert [value(registry, number) for number in registry.numbers("general")] == [1.0, 3.0, 4.0]


def folders(storage: ObjectStorage) -> int:
    """Of files that a manifest names, or that none does."""
    return len({name.split("/")[1] for name in files(storage) if "/." in name})


def test_what_is_retired_is_gone_and_remembered(registry: Registry, storage: ObjectStorage):
    for parent in (None, 1, 2, 3):
        publish(registry, parent=parent)
    write(PointerFiles(storage), "general", Rollout(4, None, 0.0, 1.0))
    assert retire(registry, "general", 1, PointerFiles(storage).locked("general")) == [3, 4]
    assert registry.numbers("general") == [3, 4]
    assert folders(storage) == 2
    assert [one.number for one in registry.removed("general")] == [1, 2]


def test_an_intention_is_found_by_who_comes_after(registry: Registry):
    assert registry.begun("general") is None
    token = registry.begin("general", {"parent": 1})
    number = registry.publish("general", {"w": torch.ones(1)}, {}, {"attempt": token})
    found = registry.begun("general")
    assert found[1] == number
    registry.finish("general")
    assert registry.begun("general") is None


def test_a_pointer_is_swapped_only_in_the_place_of_what_was_read(storage: ObjectStorage):
    assert storage.swap("a", None, b"1")
    assert not storage.swap("a", None, b"2"), "there is one"
    assert not storage.swap("a", b"0", b"2"), "it is another"
    assert storage.swap("a", b"1", b"2")
    assert not storage.swap("b", b"1", b"2"), "there is none"
    assert storage.read("a") == b"2"


def test_a_stale_tag_changes_nothing_and_the_move_is_made_again(storage: ObjectStorage):
    pointers = PointerFiles(storage)
    write(pointers, "general", FIRST)
    stale, seen = [True], []

    def moved_meanwhile(**given: Any) -> Any:
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

    client = Client(storage, get_object=moved_meanwhile)
    moved = pointers.update("general", change)
    assert [one.moves for one in seen] == [0, 7]
    assert pointers.read("general") == moved == Rollout(2, None, 0.0, 2.0, moves=8)


def test_an_answer_that_was_lost_is_no_move_of_somebody_else(storage: ObjectStorage):
    """What asks again, because no answer came, finds that the store has done it."""

    def twice(**given: Any) -> Any:
        client.real.put_object(**given)
        return client.real.put_object(**given)

    client = Client(storage, put_object=twice)
    assert storage.swap("a", None, b"1")
    assert storage.swap("a", b"1", b"2")
    assert publish(Registry(storage)) == 1


def test_moves_that_race_are_made_one_after_the_other(storage: ObjectStorage):
    files = PointerFiles(storage)
    write(files, "general", FIRST)

    def count(_: int) -> None:
        for _ in range(3):
            files.update("general", lambda now: Rollout(1, None, 0.0, 1.0, moves=(now or FIRST).moves + 1))

    together(count, range(3))
    assert files.read("general") == Rollout(1, None, 0.0, 1.0, moves=9)


def test_a_lock_is_taken_from_who_is_silent_and_from_nobody_else(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(object_storage, "WAIT_SECONDS", 0.2)
    with storage.locked("general"):
        with pytest.raises(OSError, match="held by another process"), storage.locked("general"):
            pass
        monkeypatch.setattr(object_storage, "SILENT_SECONDS", -1.0)
        with storage.locked("general"):
            pass
    with storage.locked("general"):
        pass


def test_a_trainer_that_was_replaced_elsewhere_writes_nothing_more(url: str, tmp_path: Path):
    """Nodes that share no folder know nothing of each other's locks: the number in the store decides."""
    first, second = (
        Lease(PointerFiles(ObjectStorage(url, tmp_path / node, 3)), "general") for node in ("one", "other")
    )
    assert first.take(FIRST)
    with first.held():
        pass
    assert second.take(FIRST)
    with pytest.raises(FencedError), first.held():
        pass
    first.release()
    second.release()


def test_a_node_loads_from_its_cache_when_the_store_is_gone(registry: Registry, storage: ObjectStorage):
    publish(registry, 1.0)
    publish(registry, 2.0)
    assert value(registry, 1) == 1.0

    def gone(**_given: object) -> None:
        raise EndpointConnectionError(endpoint_url="http://store")

    Client(storage, get_object=gone, head_object=gone, list_objects_v2=gone)
    assert value(registry, 1) == 1.0
    with pytest.raises(VersionError, match=r"^general/2: cannot read manifest.json \(registry.url [^\n]* not answer: "):
        registry.load("general", 2)


def test_a_damaged_cache_is_read_anew(registry: Registry, tmp_path: Path):
    publish(registry, 1.0)
    assert value(registry, 1) == 1.0
    for file in (tmp_path / "node").glob(".cache-*/*"):
        if file.suffix != ".json":
            file.write_bytes(b"damaged")
    assert value(registry, 1) == 1.0


class Reads:
    """The names of what all storages read from the store, each as often as they do."""

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


def test_a_node_that_has_the_version_before_reads_what_is_new_alone(
    registry: Registry, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    large(registry, 1.0)
    reads = Reads(monkeypatch)
    other = Registry(ObjectStorage(url, tmp_path / "other", 3))
    other.load("general", 1)
    large(registry, 1.0001)
    reads.names.clear()
    found = other.load("general", 2).weights["w"]
    assert torch.equal(found, torch.arange(5000) * 0.01 + 1.0001)
    assert [name.partition(".from-")[0] for name in reads.of_weights()] == ["model.safetensors"]
    assert ".from-" in reads.of_weights()[0]
    third = Registry(ObjectStorage(url, tmp_path / "third", 3))
    assert torch.equal(third.load("general", 2).weights["w"], found)
    assert reads.of_weights()[1:] == ["model.safetensors"]


def test_what_is_new_is_not_kept_where_it_is_not_less(registry: Registry, storage: ObjectStorage):
    publish(registry, 1.0)
    for seed in (1, 2):  # of another size than the first, and like nothing before
        noise = torch.randint(256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        registry.publish("general", {"w": noise}, {"kind": "eagle"}, {})
    for number in (2, 3):
        assert storage.has("general", number)
    assert not [name for name in files(storage) if ".from-" in name]


@pytest.mark.parametrize("damage", [b"damaged", delta.encode(b"x" * 20136, b"y" * 20136)])
def test_what_is_new_and_damaged_is_not_used(
    damage: bytes,
    registry: Registry,
    storage: ObjectStorage,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    large(registry, 1.0)
    other = Registry(ObjectStorage(url, tmp_path / "other", 3))
    other.load("general", 1)
    large(registry, 1.0001)
    [name] = [name for name in files(storage) if ".from-" in name]
    storage.replace(name, damage)
    assert torch.equal(other.load("general", 2).weights["w"], torch.arange(5000) * 0.01 + 1.0001)
    assert "what is new in version 2 of general is damaged, all of it is read" in caplog.text


def test_one_of_many_on_a_machine_reads_a_version_for_all(
    registry: Registry, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    large(registry, 1.0)
    reads = Reads(monkeypatch)
    found: list[float] = []

    def load(_: int) -> None:
        replica = Registry(ObjectStorage(url, tmp_path / "other", 3))
        found.append(float(replica.load("general", 1).weights["w"][0]))

    together(load, range(8))
    assert found == [1.0] * 8
    assert sorted(reads.names) == ["config.json", "manifest.json", "model.safetensors"]
    assert not list((tmp_path / "other").glob(".cache-*/.lock-*"))


def test_a_cache_keeps_what_was_used_last(tmp_path: Path):
    cache = FileCache(tmp_path / "cache", 2)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "gone").symlink_to("nowhere")  # as a file that another process has just deleted
    for number, name in enumerate(("a", "b", "c")):
        cache.put(name, name.encode())
        os.utime(tmp_path / "cache" / name, (number + 1, number + 1))
    assert [cache.get(name) for name in ("a", "b", "c")] == [None, b"b", b"c"]


def settings_at(url: str, home: Path) -> Settings:
    return load_settings(None, [f"registry.url={url}", f"home={home}"], {})


def test_a_bucket_that_is_not_there_is_named(store: ObjectStore, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^registry.url s3://nowhere/x: there is no bucket nowhere$"):
        check_settings(settings_at("s3://nowhere/x", tmp_path))


def test_without_credentials_it_says_so(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match=r"^registry.url [^\n]*: there are no credentials; set AWS_ACCESS_KEY_ID"):
        check_settings(settings_at(url, tmp_path))


def test_without_the_extra_it_says_what_to_install(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(ConfigError, match=r"packages that are not installed: pip install 'osd\[s3\]'$"):
        check_settings(settings_at(url, tmp_path))


@pytest.mark.parametrize("bad", ["gs://bucket", "s3://", "s3://B", "bucket"])
def test_what_is_no_address_of_a_store_is_refused(bad: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"registry\.url"):
        settings_at(bad, tmp_path)


def test_settings_name_the_storage(tmp_path: Path):
    assert isinstance(storage_of(settings_at("s3://bucket/x", tmp_path)), ObjectStorage)
    assert storage_of(load_settings(None, [f"home={tmp_path}"], {})).local == tmp_path / "registry"


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4096, 4099])
def test_what_comes_out_is_what_went_in_whatever_the_size(size: int):
    chance = np.random.default_rng(size)
    data, base = chance.bytes(size), chance.bytes(size)
    assert delta.decode(delta.encode(data, base), base) == data


def test_numbers_that_moved_a_little_take_fewer_bytes():
    base = np.random.default_rng(1).bytes(40_000)
    data = bytearray(base)
    data[::4] = np.random.default_rng(2).bytes(10_000)
    assert len(delta.encode(bytes(data), base)) < 0.3 * len(base)


def test_another_base_makes_something_else():
    assert delta.decode(delta.encode(b"abcdefgh", b"abcdabcd"), b"abcdabce") != b"abcdefgh"


def test_files_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match="8 bytes beside 4"):
        delta.encode(b"abcdefgh", b"abcd")


@pytest.mark.parametrize(
    "bad", [b"", b"no delta", delta.encode(bytes(4), bytes(4)), delta.encode(bytes(12), bytes(12))]
)
def test_what_is_no_delta_for_the_base_is_refused(bad: bytes):
    with pytest.raises(ValueError, match=r"delta|bytes beside"):
        delta.decode(bad, bytes(8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def test_a_value_is_read_again_between_half_of_its_time_and_all_of_it(clock: Clock):
    numbers = itertools.count()
    values = ReadCache(30.0)
    assert [values.get("a", lambda: next(numbers)) for _ in range(3)] == [0, 0, 0]
    clock.now += 14.9
    assert values.get("a", lambda: next(numbers)) == 0
    clock.now += 15.1
    assert values.get("a", lambda: next(numbers)) == 1


def test_names_are_apart_and_without_patience_nothing_is_remembered(clock: Clock):
    values = ReadCache(30.0)
    assert (values.get("a", lambda: 1), values.get("b", lambda: 2)) == (1, 2)
    assert [ReadCache(0.0).get("a", lambda n=n: n) for n in (1, 2)] == [1, 2]


def test_in_doubt_a_value_counts_for_two_seconds(clock: Clock):
    values = ReadCache(30.0)
    values.get("a", lambda: 1)
    clock.now += 1.9
    values.doubt()
    assert values.get("a", lambda: 2) == 1
    clock.now += 0.2
    assert values.get("a", lambda: 2) == 2


def test_a_read_that_fails_is_no_value(clock: Clock):
    values = ReadCache(30.0)
    with pytest.raises(OSError, match="gone"):
        values.get("a", gone)
    assert values.get("a", lambda: 1) == 1


def gone() -> int:
    raise OSError("gone")
