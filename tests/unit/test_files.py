from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from osd import files


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
    file, stale, fresh, other = (tmp_path / name for name in ("a*", ".a*.1", ".a*.2", ".ab.1"))
    for left in (stale, fresh, other):
        left.write_bytes(b"")
    for old in (stale, other):
        os.utime(old, (0, time.time() - 7200))
    files.replace(file, b"new")
    assert sorted(tmp_path.iterdir()) == sorted([file, fresh, other])
