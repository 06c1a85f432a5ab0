"""Where a registry lies: what it asks of a local folder and of an object store alike."""

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
    """Versions and small files, for any number of processes. Names are paths below the root, as ``code/history.json``.

    A version is seen whole or not at all, under one number for ever. ``local`` is a folder of this machine, or of those
    that share it: for what is no part of a registry and lies beside it. Who watches a pointer reads it again after
    ``patience`` seconds at the latest, however often Redis is asked: each time that something is read may cost.

    Raises:
        OSError: from every method: the storage does not give or take it; FileNotFoundError where there is no such file.
    """

    local: Path
    patience: float = 0.0

    @abstractmethod
    def check(self) -> None:
        """Raise at once, with one line, what would keep every other method from working."""

    @abstractmethod
    def names(self) -> list[str]:
        """What lies directly below the root: names of files, and of folders that hold something."""

    @abstractmethod
    def where(self, name: str) -> str:
        """What people call a file: its path or address."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file."""

    @abstractmethod
    def replace(self, name: str, data: bytes, guard: AbstractContextManager[None] | None = None) -> None:
        """Put ``data`` in the place of a file, as a whole; ``guard`` is held while it comes in sight."""

    @abstractmethod
    def swap(self, name: str, before: bytes | None, data: bytes) -> bool:
        """The same if the file still holds ``before``, or is not there where that is None; False where it does not.

        The caller holds the domain's lock, and may have lost it where a storage takes locks from those that hang.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def locked(self, domain: str) -> AbstractContextManager[None]:
        """Hold a domain's lock among all processes; for moments only."""

    @abstractmethod
    def numbers(self, domain: str) -> list[int]:
        """The numbers of the domain's versions, in order."""

    @abstractmethod
    def has(self, domain: str, number: int) -> bool:
        """Whether there is that version."""

    @abstractmethod
    def read_version(self, domain: str, number: int, file: str, sha256: object = None) -> bytes:
        """A file of a version; ``sha256`` is what the manifest says of it."""

    @abstractmethod
    def publish(self, domain: str, content: Mapping[str, bytes], guard: AbstractContextManager[None]) -> int:
        """Add a version under the next free number, which is returned; ``guard`` is held while it comes in sight."""

    @abstractmethod
    def hide(self, domain: str, numbers: Iterable[int]) -> list[str]:
        """Take versions out of sight; returns what ``delete`` is to be given. One that cannot be hidden is logged."""

    @abstractmethod
    def delete(self, domain: str, hidden: Iterable[str]) -> None:
        """Delete what was hidden; what cannot be deleted now goes with a later version."""


def version_number(name: str) -> int | None:
    """The number that a version's folder is named by, None for any other name."""
    return int(name) if name.isascii() and name.isdigit() and name[0] != "0" else None


class ReadCache:
    """Cache of storage reads; each stays for a random time between half of ``seconds`` and all of it.

    So not all processes read again at the same time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: dict[str, tuple[float, float, Any]] = {}  # when each was read, and until when it counts

    def get(self, name: str, read: Callable[[], _Value]) -> _Value:
        """Return the value of a name, from ``read`` where there is none."""
        _, until, value = self._values.get(name, (0.0, 0.0, None))
        now = time.monotonic()
        if now >= until:
            value = read()
            self._values[name] = now, now + self._seconds * random.uniform(0.5, 1), value  # noqa: S311  no secret
        return value

    def doubt(self) -> None:
        """Keep values for two seconds at most after they were read: nobody announces changes now."""
        for name, (at, until, value) in list(self._values.items()):
            self._values[name] = at, min(until, at + _DOUBTED_SECONDS), value
