"""Files that outlive a crash: at any moment the old one is there or the new one, whole."""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path


def write(path: Path, *parts: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a new file and wait until the disk has it; ``sync_directory`` makes its name last too."""
    with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, *parts: bytes | memoryview, mode: int = 0o666) -> None:
    """Put ``parts`` in the place of a file, whose directory is made; a crash may leave a ``.<name>.*`` beside it.

    Args:
        path: of the file.
        parts: of what it is to hold.
        mode: who may read and write it, before the umask.

    Raises:
        OSError: the disk does not take it; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write(temporary, *parts, mode=mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
