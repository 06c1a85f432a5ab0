"""Interface of the storage below a registry: a local folder or an object store."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

_Value = TypeVar("_Value")

_DOUBTED_SECONDS = 2.0

WEIGHTS, CONFIG, MANIFEST = "model.safetensors", "config.json", "manifest.json"


class Storage(ABC):
    """Versions and small files of a registry, for any number of processes.

    Names are paths below the root, such as ``code/history.json``. A version becomes visible as a whole, under a number
    that never changes.

    Attributes:
        local: a folder of this machine, or of the machines that share it, for files that do not belong to the registry.
        patience: maximum age, in seconds, of the pointer that a watcher works with when Redis announces no move. Each
            read of an object store may cost money.

    Raises:
        OSError: from every method: the storage cannot be read or written; FileNotFoundError when the file is missing.
    """

    local: Path
    patience: float = 0.0

    @abstractmethod
    def check(self) -> None:
        """Raise an error of one line if the storage cannot work at all."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the files and of the non-empty folders directly below the root."""

    @abstractmethod
    def address(self, name: str) -> str:
        """Return the path or URL of a file, for messages."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    @abstractmethod
    def replace(self, name: str, data: bytes, guard: AbstractContextManager[None] | None = None) -> None:
        """Write a file atomically; enter ``guard`` while the new file becomes visible."""

    @abstractmethod
    def swap(self, name: str, before: bytes | None, data: bytes) -> bool:
        """Write a file atomically if its content is still ``before``; return whether it was written.

        The caller holds the lock of the domain. It may have lost the lock in a storage that takes locks from silent
        holders.

        Args:
            name: the file.
            before: the expected content, None for a missing file.
            data: the new content.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file if it exists."""

    @abstractmethod
    def locked(self, domain: str) -> AbstractContextManager[None]:
        """Return a context that holds the lock of a domain among all processes; hold it for moments only."""

    @abstractmethod
    def numbers(self, domain: str) -> list[int]:
        """Return the numbers of the domain's versions in ascending order."""

    @abstractmethod
    def has(self, domain: str, number: int) -> bool:
        """Return whether a version exists."""

    @abstractmethod
    def read_version(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """Return the content of a file of a version; ``sha256`` is its hash in the manifest."""

    @abstractmethod
    def publish(self, domain: str, content: Mapping[str, bytes], guard: AbstractContextManager[None]) -> int:
        """Add a version under the next free number and return the number.

        Args:
            domain: the domain of the version.
            content: the bytes of each file, by name.
            guard: a context to enter while the version becomes visible.
        """

    @abstractmethod
    def hide(self, domain: str, numbers: Iterable[int]) -> list[str]:
        """Make versions invisible and return the names to pass to ``delete``; log each version that stays visible."""

    @abstractmethod
    def delete(self, domain: str, hidden: Iterable[str]) -> None:
        """Delete hidden versions; a failed deletion is repeated when a later version is deleted."""


def version_number(name: str) -> int | None:
    """Return the version number in the name of a folder, or None for any other name."""
    return int(name) if name.isascii() and name.isdigit() and name[0] != "0" else None


class ReadCache:
    """Cache of storage reads with a random time to live between half of ``seconds`` and all of it.

    The random part keeps many processes from reading at the same time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: dict[str, tuple[float, float, Any]] = {}  # time of the read, end of validity, value

    def get(self, name: str, read: Callable[[], _Value]) -> _Value:
        """Return the cached value of a name; call ``read`` when there is no valid value."""
        _, until, value = self._values.get(name, (0.0, 0.0, None))
        now = time.monotonic()
        if now >= until:
            value = read()
            self._values[name] = now, now + self._seconds * random.uniform(0.5, 1), value  # noqa: S311  no secret
        return value

    def doubt(self) -> None:
        """Limit the validity of all values to two seconds after their read, because Redis announces no changes."""
        for name, (read_at, until, value) in list(self._values.items()):
            self._values[name] = read_at, min(until, read_at + _DOUBTED_SECONDS), value
