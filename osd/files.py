"""Files that outlive a crash: at any moment the old one is there or the new one, whole."""

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

_LOOK_SECONDS = 0.005


def write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a new file and wait until the disk has it; ``sync_directory`` makes its name last too."""
    with _named(path), open(path, "xb") as file:
        fill(file, *parts)


def fill(file: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write to a new file that is open, and wait until the disk has it."""
    for part in parts:
        file.write(part)
    file.flush()
    os.fsync(file.fileno())


def replace(
    path: Path, *parts: bytes | memoryview, mode: int = 0o666, guard: AbstractContextManager[None] | None = None
) -> None:
    """Put ``parts`` in the place of a file, whose directory is made; ``mode`` says who may read it, before the umask.

    ``guard`` is held while the new one takes the place of the old one, and not while it is written. A crash may leave a
    ``.<name>.*`` beside it, which the next call removes.

    Raises:
        OSError: the disk does not take it; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    clear(path)
    with _named(path), _temporary(path, mode) as file:
        fill(file, *parts)
        with guard or contextlib.nullcontext():
            os.replace(file.name, path)
    sync_directory(path.parent)


def clear(path: Path) -> None:
    """Remove what writers that were killed left beside a file; what one is writing stays, by its lock.

    What cannot be removed stays too.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError), open(left, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


@contextlib.contextmanager
def _temporary(path: Path, mode: int) -> Generator[BinaryIO]:
    """A new file beside ``path``, locked as long as it is open; gone afterwards, unless it was renamed."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            try:
                if _claimed(file, temporary):
                    yield file
                    return
            finally:
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def directory(folder: Path, first: str) -> Generator[tuple[Path, BinaryIO]]:
    """A new directory in ``folder`` whose name begins with a dot, and its file ``first``, locked as long as it is open.

    The directory is gone afterwards, unless it was renamed.
    """
    while True:
        made = folder / f".{secrets.token_hex(8)}"
        made.mkdir()
        try:
            file = None
            with contextlib.suppress(FileNotFoundError):  # it was taken away at once
                file = open(made / first, "xb")  # noqa: SIM115 (closed below)
            if file is not None:
                with _named(made), file:
                    if _claimed(file, made / first):
                        yield made, file
                        return
        finally:
            shutil.rmtree(made, ignore_errors=True)


def clear_directories(folder: Path, first: str) -> None:
    """The same for what ``directory`` left; what one is filling stays."""
    for left in folder.glob(".*/"):
        with contextlib.suppress(OSError):
            left.rmdir()  # where somebody is about to fill it, he begins again
        try:
            with open(left / first, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # gone, or cleared by half
            shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue


@contextlib.contextmanager
def _named(path: Path) -> Generator[None]:
    """An error of the operating system, such as a full disk, says what was written."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _claimed(file: BinaryIO, path: Path) -> bool:
    """Lock a new file; False where somebody took it for what was left before it was locked."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return path.exists()


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, seconds: float = 10.0) -> Generator[None]:
    """Hold a lock among processes and threads, on a file that is made; one that dies gives it back.

    Raises:
        OSError: it cannot be had within ``seconds``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, f"held by another process for {seconds:g} s", str(path)) from None
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)
