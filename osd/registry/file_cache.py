"""Cache of immutable files on the local disk, with removal of the least recently used file."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from osd import files

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 60.0


class FileCache:
    """Cache of at most ``capacity`` files in ``folder``, shared by any number of processes."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder, self._capacity = folder, capacity

    def get(self, name: str, sha256: str | None = None) -> bytes | None:
        """Return the content of a file, or None when it is not cached.

        With ``sha256``, a file with another hash is deleted and counts as not cached.
        """
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
        """Return the content of a file; read it from ``source`` when it is not cached.

        Only one process of the machine reads from ``source``. The other processes wait until the file is cached.

        Raises:
            Exception: any error of ``source``.
        """
        data = self.get(name, sha256)
        if data is not None:
            return data
        lock = self._folder / f".lock-{name}"
        with contextlib.ExitStack() as stack:
            # The lock only saves reads: without it (its owner hangs, or the disk is full) every process reads.
            with contextlib.suppress(OSError):
                stack.enter_context(files.locked(lock, _LOCK_SECONDS))
            try:
                data = self.get(name, sha256)
                if data is None:
                    data = source()
                    self.put(name, data)
            finally:
                with contextlib.suppress(OSError):  # the cached file makes the lock superfluous
                    lock.unlink()
        return data

    def put(self, name: str, data: bytes) -> None:
        """Add a file and remove the least recently used files above the capacity; log an error of the disk."""
        try:
            files.replace(self._folder / name, data)
            cached = (path for path in self._folder.iterdir() if path.name[0] != ".")
            for path in sorted(cached, key=_last_use, reverse=True)[self._capacity :]:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s is not cached: %s", name, error)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
