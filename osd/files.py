"""Atomic and durable writes: after a crash a file has its old or its new content, never a part.

Files and directories have permissions for their owner only, because weights and traces come from users' text.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import BinaryIO

_RETRY_SECONDS = 0.005
_OWNER_ONLY, _OWNER_ONLY_DIRECTORY = 0o600, 0o700
_opener = partial(os.open, mode=_OWNER_ONLY)


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(_OWNER_ONLY_DIRECTORY, exist_ok=True)


def write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a new file and sync its content to disk; ``sync_directory`` syncs its name."""
    with _named(path), open(path, "xb", opener=_opener) as file:
        fill(file, *parts)


def fill(file: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write to an open file and sync its content to disk."""
    for part in parts:
        file.write(part)
    file.flush()
    os.fsync(file.fileno())


def replace(path: Path, *parts: bytes | memoryview, guard: AbstractContextManager[None] | None = None) -> None:
    """Replace a file atomically; create its directory if necessary.

    A crash may leave a temporary file ``.<name>.*`` in the directory, which the next call removes.

    Args:
        path: the file to replace.
        parts: the new content.
        guard: a context to enter for the rename, but not for the write before it.

    Raises:
        OSError: the disk cannot be written; the old file stays.
    """
    make_directory(path.parent)
    clear(path)
    with _named(path), _temporary(path) as file:
        fill(file, *parts)
        with guard or contextlib.nullcontext():
            os.replace(file.name, path)
    sync_directory(path.parent)


def clear(path: Path) -> None:
    """Remove the temporary files of dead writers of a file.

    Files that a live writer has locked stay, and so do files that cannot be removed.
    """
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError), open(temporary, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()


@contextlib.contextmanager
def _temporary(path: Path) -> Generator[BinaryIO]:
    """Yield a new locked file in the directory of ``path``; delete it afterwards, unless it was renamed."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(temporary, "xb", opener=_opener) as file:
            try:
                if _claimed(file, temporary):
                    yield file
                    return
            finally:
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def directory(folder: Path, first: str) -> Generator[tuple[Path, BinaryIO]]:
    """Yield a new directory in ``folder`` and its open, locked file ``first``; delete it afterwards, unless renamed.

    The name of the directory begins with a dot.
    """
    while True:
        temporary = folder / f".{secrets.token_hex(8)}"
        temporary.mkdir(_OWNER_ONLY_DIRECTORY)
        try:
            file = None
            with contextlib.suppress(FileNotFoundError):  # another process has already cleared the directory
                file = open(temporary / first, "xb", opener=_opener)  # noqa: SIM115 (closed below)
            if file is not None:
                with _named(temporary), file:
                    if _claimed(file, temporary / first):
                        yield temporary, file
                        return
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def clear_directories(folder: Path, first: str) -> None:
    """Remove the directories that dead users of ``directory`` left; those of live users stay."""
    for temporary in folder.glob(".*/"):
        with contextlib.suppress(OSError):
            temporary.rmdir()  # a process that has just created it creates another one
        try:
            with open(temporary / first, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(temporary, ignore_errors=True)
        except FileNotFoundError:  # already deleted, or partly
            shutil.rmtree(temporary, ignore_errors=True)
        except OSError:
            continue


@contextlib.contextmanager
def _named(path: Path) -> Generator[None]:
    """Add the path to an operating system error without one, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _claimed(file: BinaryIO, path: Path) -> bool:
    """Lock a new file; return False when another process deleted it before, as a leftover."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return path.exists()


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, seconds: float = 10.0) -> Generator[None]:
    """Hold an exclusive lock among processes and threads; the kernel frees the lock of a dead process.

    Args:
        path: the lock file, which is created if necessary.
        seconds: maximum time to wait.

    Raises:
        OSError: another process held the lock for ``seconds``.
    """
    make_directory(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, f"held by another process for {seconds:g} s", str(path)) from None
            time.sleep(_RETRY_SECONDS)
        yield
    finally:
        os.close(descriptor)
