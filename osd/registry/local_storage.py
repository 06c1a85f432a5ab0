"""Storage of a registry in a folder of one machine, or in a shared folder of several machines.

``<root>/<domain>/<number>/`` holds ``model.safetensors``, ``config.json`` and ``manifest.json``.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from osd import files
from osd.registry.storage import WEIGHTS, Storage, version_number

logger = logging.getLogger(__name__)


class LocalStorage(Storage):
    """Storage in a folder, with atomic renames and kernel locks."""

    def __init__(self, root: Path) -> None:
        self.local = Path(root)

    def check(self) -> None:
        """Do nothing: folders are created on demand."""

    def names(self) -> list[str]:
        return [path.name for path in self.local.iterdir()] if self.local.is_dir() else []

    def address(self, name: str) -> str:
        return str(self.local / name)

    def read(self, name: str) -> bytes:
        return (self.local / name).read_bytes()

    def replace(self, name: str, data: bytes, guard: AbstractContextManager[None] | None = None) -> None:
        files.replace(self.local / name, data, guard=guard)

    def swap(self, name: str, before: bytes | None, data: bytes) -> bool:
        """Write a file atomically and return True: a kernel lock cannot be lost, so ``before`` needs no check."""
        self.replace(name, data)
        return True

    def remove(self, name: str) -> None:
        (self.local / name).unlink(missing_ok=True)

    def locked(self, domain: str) -> AbstractContextManager[None]:
        """Return a context that holds the lock of a domain; the kernel frees the lock of a dead process."""
        return files.locked(self.local / f".{domain}.lock")

    def numbers(self, domain: str) -> list[int]:
        return numbers_in(self.local / domain)

    def has(self, domain: str, number: int) -> bool:
        return self._version(domain, number).is_dir()

    def read_version(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """Return the content of a file of a version; the caller checks the hash."""
        return (self._version(domain, number) / file).read_bytes()

    def publish(self, domain: str, content: Mapping[str, bytes], guard: AbstractContextManager[None]) -> int:
        """Write a hidden folder, rename it to the next free number and return the number."""
        folder = self.local / domain
        files.make_directory(folder)
        files.clear_directories(folder, WEIGHTS)
        with files.directory(folder, WEIGHTS) as (temporary, file):
            files.fill(file, content[WEIGHTS])
            for name, data in content.items():
                if name != WEIGHTS:
                    files.write(temporary / name, data)
            files.sync_directory(temporary)
            with guard:
                number = _claim_number(folder, temporary)
        files.sync_directory(folder)
        return number

    def hide(self, domain: str, numbers: Iterable[int]) -> list[str]:
        """Rename the folders of versions to hidden names and return these names."""
        hidden = [name for number in numbers if (name := _move_aside(self._version(domain, number)))]
        files.sync_directory(self.local / domain)
        return hidden

    def delete(self, domain: str, hidden: Iterable[str]) -> None:
        """Delete hidden folders; ``publish`` deletes the folders that a killed process left."""
        for name in hidden:
            shutil.rmtree(self.local / domain / name, ignore_errors=True)

    def _version(self, domain: str, number: int) -> Path:
        return self.local / domain / str(number)


def as_storage(place: Path | Storage) -> Storage:
    """Return a storage unchanged, and a local storage for a folder."""
    return place if isinstance(place, Storage) else LocalStorage(place)


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers of the versions in a domain's folder in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(number for entry in folder.iterdir() if (number := version_number(entry.name)) is not None)


def _claim_number(folder: Path, temporary: Path) -> int:
    """Rename a folder to the next free number; a rename onto a version fails because its folder is not empty."""
    number = max(numbers_in(folder), default=0) + 1
    while True:
        try:
            os.rename(temporary, folder / str(number))
        except OSError:
            if not (folder / str(number)).exists():
                raise
            number += 1
        else:
            return number


def _move_aside(path: Path) -> str | None:
    aside = path.with_name(f".{secrets.token_hex(8)}")
    try:
        os.rename(path, aside)
    except OSError as error:
        logger.warning("drafter version %s of %s cannot be removed: %s", path.name, path.parent.name, error)
        return None
    return aside.name
