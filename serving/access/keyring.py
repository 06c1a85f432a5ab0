"""The keys that a service knows, as they are now."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from osd.config import ConfigError, ServingSettings
from serving.access import keys_file
from serving.access.keys import Key, Right, hash_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long a file of keys may have changed before that counts."""

_Stamp = tuple[int, int, int]


class Keyring:
    """The keys of the settings, or of ``serving.keys_file``, which is read again when it has changed.

    A file that is refused leaves the keys as they were. Used on one event loop.
    """

    def __init__(self, serving: ServingSettings, refused: Callable[[str], None]) -> None:
        """Know the keys of ``serving``; ``refused`` is told, on another thread, why a changed file is not taken.

        Raises:
            ConfigError: the file is refused.
        """
        self._file, self._refused = serving.keys_file, refused
        self._stamp = self._stamp_now()
        self._keys = _of_settings(serving) if self._file is None else keys_file.load(self._file)
        self._look_at = time.monotonic() + LOOK_SECONDS
        self.free: frozenset[Right] = frozenset()
        """What needs no key."""
        if self._file is None and serving.api_key is None:
            self.free = frozenset({"generate", "watch"})

    @property
    def administered(self) -> bool:
        """Whether there is a key that may administer."""
        return any(key.allows("administer") for key in self._keys)

    async def find(self, secret: bytes | None) -> Key | None:
        """The key that a secret is, None for none."""
        if self._file is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            await asyncio.to_thread(self._look)
        if secret is None:
            return None
        hashed = hash_of(secret)
        matching = [key for key in self._keys if key.opens(hashed)]  # all are tried: the time tells nothing
        return matching[0] if matching else None

    def _look(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp or self._file is None:
            return
        self._stamp = stamp
        try:
            self._keys = keys_file.load(self._file)
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
            self._refused(str(error))
        else:
            logger.info("the keys of %s are read again: %s", self._file, ", ".join(key.name for key in self._keys))

    def _stamp_now(self) -> _Stamp | None:
        """What tells a file from a changed one, None where there is none."""
        if self._file is None:
            return None
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _of_settings(serving: ServingSettings) -> tuple[Key, ...]:
    found: list[Key] = []
    if serving.api_key is not None:
        hashed = hash_of(serving.api_key.get_secret_value().encode())
        found.append(Key("serving.api_key", (hashed,), frozenset({"generate", "watch"})))
    if serving.admin_key is not None:
        hashed = hash_of(serving.admin_key.get_secret_value().encode())
        found.append(Key("serving.admin_key", (hashed,), frozenset({"administer"})))
    return tuple(found)
