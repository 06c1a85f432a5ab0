"""Atomic and durable writes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from osd import files
from tests.waiting import together


def test_replace_writes_the_whole_file_and_its_directory(tmp_path: Path):
    file = tmp_path / "made" / "file"
    files.replace(file, b"old")
    files.replace(file, b"n", b"ew")
    assert file.read_bytes() == b"new"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_files_and_directories_are_the_owners_alone(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        files.replace(tmp_path / "a" / "b" / "file", b"")
        files.write(tmp_path / "a" / "written", b"")
        with files.locked(tmp_path / "c" / "lock"), files.directory(tmp_path, "first") as (temporary, _):
            temporary.rename(tmp_path / "kept")
    finally:
        os.umask(before)
    paths = list(tmp_path.rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}
    assert len(paths) == 8


def test_replace_on_a_full_disk_keeps_only_the_old_file(tmp_path: Path, monkeypatch):
    file = tmp_path / "file"
    files.replace(file, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space leftover on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_replace_clears_leftovers_but_no_file_in_use(tmp_path: Path):
    file, leftover, in_use, unrelated = (tmp_path / name for name in ("a*", ".a*.1", ".a*.2", ".ab.1"))
    for path in (leftover, unrelated):
        path.write_bytes(b"")
    with in_use.open("xb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        files.replace(file, b"new")
        assert sorted(tmp_path.iterdir()) == sorted([file, in_use, unrelated])
    files.replace(file, b"newer")
    assert sorted(tmp_path.iterdir()) == sorted([file, unrelated])


def test_concurrent_replaces_leave_one_whole_file(tmp_path: Path):
    file = tmp_path / "file"

    def write(number: int) -> None:
        for _ in range(200):
            files.replace(file, bytes([number]) * 100)

    together(write, range(4))
    assert len(set(file.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [file]
