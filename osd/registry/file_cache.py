"""Files that never change, kept on this machine: the ones that were used last."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from osd import files

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 60.0


class FileCache:
    """At most ``most`` files in ``folder``, for any number of processes."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most

    def get(self, name: str, sha256: str | None = None) -> bytes | None:
        """A file, None where there is none or a disk has changed what has that hash."""
        path = self._folder / name
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def fetch(self, name: str, sha256: str | None, source: Callable[[], bytes]) -> bytes:
        """A file; where there is none, one process of this machine reads it from ``source``, and others wait for it.

        Raises:
            Whatever ``source`` does.
        """
        data = self.get(name, sha256)
        if data is not None:
            return data
        lock = self._folder / f".lock-{name}"
        with contextlib.ExitStack() as held:
            # Where whoever has the lock hangs, or the disk is full, the file is read all the same.
            with contextlib.suppress(OSError):
                held.enter_context(files.locked(lock, _WAIT_SECONDS))
            try:
                data = self.get(name, sha256)
                if data is None:
                    data = source()
                    self.put(name, data)
            finally:
                with contextlib.suppress(OSError):  # those who wait find the file, and others no longer lock it
                    lock.unlink()
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keep a file in the place of the one that was used least lately; a disk that does not take it is logged."""
        try:
            files.replace(self._folder / name, data)
            kept = sorted((path for path in self._folder.iterdir() if path.name[0] != "."), key=_used, reverse=True)
            for path in kept[self._most :]:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s is not kept: %s", name, error)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
