from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from osd import files
from tests.waiting import together


def test_a_file_is_replaced_whole_in_a_directory_that_is_made(tmp_path: Path):
    file = tmp_path / "made" / "file"
    files.replace(file, b"old")
    files.replace(file, b"n", b"ew", mode=0o600)
    assert file.read_bytes() == b"new"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_where_the_disk_does_not_take_it_the_old_one_stays_and_nothing_else(tmp_path: Path, monkeypatch):
    file = tmp_path / "file"
    files.replace(file, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_killed_process_left_goes_and_what_another_is_writing_stays(tmp_path: Path):
    file, left, written, other = (tmp_path / name for name in ("a*", ".a*.1", ".a*.2", ".ab.1"))
    for one in (left, other):
        one.write_bytes(b"")
    with written.open("xb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        files.replace(file, b"new")
        assert sorted(tmp_path.iterdir()) == sorted([file, written, other])
    files.replace(file, b"newer")
    assert sorted(tmp_path.iterdir()) == sorted([file, other])


def test_writers_of_one_file_never_take_what_another_writes_for_what_was_left(tmp_path: Path):
    file = tmp_path / "file"

    def write(number: int) -> None:
        for _ in range(200):
            files.replace(file, bytes([number]) * 100)

    together(write, range(4))
    assert len(set(file.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [file]
