"""Retention of versions, and the history of removed versions."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from osd import files
from osd.registry import history, retention
from osd.registry.lease import Lease
from osd.registry.local_storage import LocalStorage
from osd.registry.pointer_file import FencedError, PointerFiles, Rollout
from osd.registry.retention import retire
from osd.registry.trained_requests import REQUESTS, fingerprint, versions_trained_on
from osd.registry.versions import Registry, VersionError
from tests.pointers import LockedHides, write
from tests.waiting import background


@pytest.fixture(autouse=True)
def _skip_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


@pytest.fixture
def four(registry: Registry) -> Registry:
    """Registry with four versions; each is the child of the previous one, and the last is in service."""
    fill(registry)
    return registry


def fill(registry: Registry) -> None:
    for parent in (None, 1, 2, 3):
        publish(registry, parent)
    point(registry, 4)


def publish(registry: Registry, parent: int | None = None, **manifest: object) -> int:
    return registry.publish("general", {"w": torch.zeros(3)}, {}, {"parent": parent, **manifest})


def point(registry: Registry, stable: int, canary: int | None = None, pinned: bool = False) -> None:
    write(PointerFiles(registry.root), "general", Rollout(stable, canary, 0.1 if canary else 0.0, 1.0, pinned))


def prune(registry: Registry, keep: int) -> list[int]:
    return retire(registry, "general", keep, PointerFiles(registry.storage).locked("general"))


def test_retention_keeps_newest_serving_and_parent_versions(registry):
    parents = [None, 1, 1, 1, 3, 5, 6, 7, 8, 9, 10]
    for parent in parents:
        publish(registry, parent)
    point(registry, stable=5, canary=7)
    # 10 and 11 are the newest, 5 and 7 serve; 9, 10, 3 and 6 are their parents.
    assert prune(registry, 2) == registry.numbers("general") == [3, 5, 6, 7, 9, 10, 11]
    assert [version.number for version in registry.removed("general")] == [1, 2, 4, 8]


def test_retention_keeps_an_old_pinned_version(registry):
    publish(registry)
    point(registry, stable=1, pinned=True)
    for _ in range(30):
        publish(registry, 1)
        prune(registry, 3)
    assert registry.numbers("general") == [1, 29, 30, 31]


def test_retention_without_a_rollout_removes_nothing(registry):
    for _ in range(5):
        publish(registry)
    assert prune(registry, 1) == registry.numbers("general") == [1, 2, 3, 4, 5]


class CountedReads(LocalStorage):
    """Storage that counts reads of version files."""

    reads = 0

    def read_version(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        self.reads += 1
        return super().read_version(domain, number, file, sha256)


def test_retention_bounds_disk_and_reads_of_many_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_VERSIONS", 30)
    storage = CountedReads(tmp_path)
    registry = Registry(storage)
    sizes, reads = [], []
    for number in range(1, 81):
        publish(registry, number - 1 or None, **{REQUESTS: [fingerprint(str(number))]})
        point(registry, number)
        prune(registry, 5)
        if number in (10, 60, 80):
            sizes.append(sum(path.stat().st_size for path in registry.root.rglob("*") if path.is_file()))
            storage.reads = 0
            assert len(registry.list("general")) == 6
            reads.append(storage.reads)
    assert sizes[2] < 1.05 * sizes[1]  # the history is full at version 60
    assert reads == [6, 6, 6]
    assert registry.numbers("general") == [*range(75, 81)]
    removed = registry.removed("general")
    assert [version.number for version in removed] == [*range(45, 75)]
    assert removed[-1].manifest["parent"] == 73


def test_retention_hides_under_the_lock_and_deletes_after_it(tmp_path, monkeypatch):
    registry = Registry(LockedHides(tmp_path))
    fill(registry)
    delete, unlocked = registry.storage.delete, []

    def deleted(domain: str, hidden: Iterable[str]) -> None:
        with files.locked(tmp_path / ".general.lock", 0):
            unlocked.append(True)
        delete(domain, hidden)

    monkeypatch.setattr(registry.storage, "delete", deleted)
    assert prune(registry, 1) == [3, 4]
    assert unlocked == [True]


def test_retention_by_a_fenced_trainer_removes_nothing(four):
    pointers = PointerFiles(four.storage)
    replaced, newest = Lease(pointers, "general"), Lease(pointers, "general", lambda: False)
    assert replaced.take(Rollout(4, None, 0.0, 1.0))
    replaced.release()
    assert newest.take(Rollout(4, None, 0.0, 1.0))
    with pytest.raises(FencedError):
        retire(four, "general", 1, replaced.held())
    assert four.numbers("general") == [1, 2, 3, 4]
    assert retire(four, "general", 1, newest.held()) == [3, 4]
    newest.release()


def test_load_of_a_removed_version_names_the_removal(four):
    (four.root / "general" / "history.json").write_text("{")
    prune(four, 1)
    with pytest.raises(VersionError, match=r"^general/1: removed; only the newest versions stay on disk"):
        four.load("general", 1)
    with pytest.raises(VersionError, match=r"^there is no drafter version general/9$"):
        four.load("general", 9)


def test_trained_versions_are_known_after_the_first_is_removed(registry):
    publish(registry)
    publish(registry, 1, **{REQUESTS: [fingerprint("cmpl-a-0")]})
    for parent in (2, 3, 4):
        publish(registry, parent)
    point(registry, 5)
    prune(registry, 1)
    assert versions_trained_on(registry, "general", "cmpl-a") == registry.numbers("general") == [4, 5]


def test_concurrent_reader_gets_a_whole_version_or_an_error(registry):
    publish(registry)
    point(registry, 1)
    done, seen = threading.Event(), set()

    def read() -> None:
        while not done.is_set():
            assert [info.problem for info in registry.list("general") if info.problem] == []
            for number in range(1, max(registry.numbers("general")) + 1):
                try:
                    registry.load("general", number)
                    seen.add("whole")
                except VersionError as error:
                    seen.add(str(error).partition(": ")[2].partition(";")[0])

    with background(read, done.set):
        for number in range(1, 80):
            publish(registry, number)
            point(registry, number + 1)
            prune(registry, 1)
    assert seen == {"whole", "removed"}


def test_hidden_version_of_a_killed_process_is_deleted_later(four, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    prune(four, 1)
    monkeypatch.undo()
    assert [info.problem for info in four.list("general")] == [None, None]
    left = [path for path in (four.root / "general").iterdir() if path.name.startswith(".")]
    assert len(left) == 2
    four.storage.delete("general", ["0123"])  # a folder that another process has deleted
    for path in left:
        os.utime(path, (1.0, 1.0))
    publish(four, 4)
    assert not any(path.exists() for path in left)


def test_history_on_a_full_disk_is_written_after_deletion(four, monkeypatch):
    add = history.add

    def full(storage, domain, manifests):
        folder = storage.local / domain
        if (folder / "1").exists() or any(path.name.startswith(".") for path in folder.iterdir()):
            raise OSError(28, "No space left on device")
        add(storage, domain, manifests)

    monkeypatch.setattr(retention.history, "add", full)
    assert prune(four, 1) == [3, 4]
    assert [version.number for version in four.removed("general")] == [1, 2]


def test_history_of_large_manifests_is_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_BYTES", 5000)
    storage = LocalStorage(tmp_path)
    for number in range(1, 30):
        history.add(storage, "general", [(number, {"requests": ["0" * 16] * 50})])
        assert (tmp_path / "general/history.json").stat().st_size <= 5000
    assert [version.number for version in history.read(storage, "general")] == [26, 27, 28, 29]
