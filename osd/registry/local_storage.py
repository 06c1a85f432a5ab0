"""A registry in a folder: of one machine, or of all that mount it.

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
    """Files that are renamed into sight, and locks that the kernel gives back."""

    def __init__(self, root: Path) -> None:
        self.local = Path(root)

    def check(self) -> None:
        """Nothing: a folder is made when it is needed."""

    def names(self) -> list[str]:
        """What lies directly below the root: names of files, and of folders."""
        return [path.name for path in self.local.iterdir()] if self.local.is_dir() else []

    def where(self, name: str) -> str:
        """Its path."""
        return str(self.local / name)

    def read(self, name: str) -> bytes:
        """A file."""
        return (self.local / name).read_bytes()

    def replace(self, name: str, data: bytes, guard: AbstractContextManager[None] | None = None) -> None:
        """Put ``data`` in the place of a file, as a whole; ``guard`` is held while it comes in sight."""
        files.replace(self.local / name, data, guard=guard)

    def swap(self, name: str, before: bytes | None, data: bytes) -> bool:
        """The same; nobody can have changed the file, as nobody takes a lock from who holds it."""
        self.replace(name, data)
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.local / name).unlink(missing_ok=True)

    def locked(self, domain: str) -> AbstractContextManager[None]:
        """Hold a domain's lock among all processes; one that dies gives it back."""
        return files.locked(self.local / f".{domain}.lock")

    def numbers(self, domain: str) -> list[int]:
        """The numbers of the domain's versions, in order."""
        return numbers_in(self.local / domain)

    def has(self, domain: str, number: int) -> bool:
        """Whether there is that version."""
        return self._version(domain, number).is_dir()

    def read_version(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """A file of a version."""
        return (self._version(domain, number) / file).read_bytes()

    def publish(self, domain: str, content: Mapping[str, bytes], guard: AbstractContextManager[None]) -> int:
        """Fill a folder whose name keeps it out of every listing, and rename it."""
        folder = self.local / domain
        folder.mkdir(parents=True, exist_ok=True)
        files.clear_directories(folder, WEIGHTS)
        with files.directory(folder, WEIGHTS) as (temporary, file):
            files.fill(file, content[WEIGHTS])
            for name, data in content.items():
                if name != WEIGHTS:
                    files.write(temporary / name, data)
            files.sync_directory(temporary)
            with guard:
                number = _claim(folder, temporary)
        files.sync_directory(folder)
        return number

    def hide(self, domain: str, numbers: Iterable[int]) -> list[str]:
        """Take versions out of sight, each with one rename."""
        hidden = [name for number in numbers if (name := _move_aside(self._version(domain, number)))]
        files.sync_directory(self.local / domain)
        return hidden

    def delete(self, domain: str, hidden: Iterable[str]) -> None:
        """Delete what was hidden; what a process that was killed left goes as others publish."""
        for name in hidden:
            shutil.rmtree(self.local / domain / name, ignore_errors=True)

    def _version(self, domain: str, number: int) -> Path:
        return self.local / domain / str(number)


def as_storage(place: Path | Storage) -> Storage:
    """A storage as it is, and a folder as one."""
    return place if isinstance(place, Storage) else LocalStorage(place)


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the versions in a domain's folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(number for entry in folder.iterdir() if (number := version_number(entry.name)) is not None)


def _claim(folder: Path, temporary: Path) -> int:
    """Rename to the next free number; a rename onto a version fails because a version is never empty."""
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
