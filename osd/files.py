"""Files that outlive a crash: at any moment the old one is there or the new one, whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it; ``sync_directory`` makes its name last too."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a file, whose directory is made; a crash may leave a ``.<name>.*`` beside it.

    Raises:
        OSError: the disk does not take it; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write(temporary, data)
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
