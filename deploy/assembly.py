"""Base of assemblies: parts on one machine that start and stop together, one assembly per home directory."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import filelock
from redis.exceptions import RedisError

from osd import files
from osd.capture.server import RedisSetupError, RedisSupervisor, open_redis, public_url
from osd.config import ConfigError, Settings
from osd.running import find, lock
from osd.sealed import discard_secrets
from osd.target.files import TargetError
from osd.target.load import check_local


class StartError(RuntimeError):
    """Error of an assembly that cannot start here; its message is one line with the setting to change."""


class PartError(StartError):
    """Error of a part that fails while it starts; its message is one line."""


class RayDied(Exception):
    """Error of a Ray server that ended by itself; its message is one line with its name."""


START_ERRORS = (StartError, ConfigError, TargetError, RedisSetupError)
"""Errors of a start; the message of each is one line, and names the setting to change except for a ``PartError``."""


class Assembly(ABC):
    """Assembly that runs from ``start`` (or entering) to ``stop`` (or leaving); ``_ends`` holds each part's end."""

    def __init__(self, settings: Settings, report: Callable[[str], None] = lambda step: None) -> None:
        """Prepare a start; ``report`` is called with each slow step."""
        self.settings, self.redis_url = settings, ""
        self._report = report
        self._ends = contextlib.ExitStack()

    def start(self) -> None:
        """Return when all parts run; after a failure all started parts are stopped again.

        Must be called on the main thread, because the Redis server ends with the thread that started it.

        Raises:
            StartError: the home directory is in use, the address or a file cannot be used, or a replica refuses the
                settings.
            PartError: a part does not start, or Redis stops answering.
            TargetError: the target cannot be loaded.
            RedisSetupError: Redis is not available.
            ConfigError: settings contradict each other, or do not fit the target.
        """
        try:
            check_local(self.settings.target.source)
            self._start()
        except BaseException as error:
            self.stop()
            if isinstance(error, RedisError):
                address, reason = public_url(self.redis_url), " ".join(str(error).split())
                message = f"Redis at {address} fails during the start ({reason}): check its load, and start again"
                raise PartError(message) from error
            if isinstance(error, OSError):
                file, reason = error.filename or "a file", error.strerror or error
                raise StartError(f"{file}: {reason}; check its owner, and the space on its disk") from error
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, report: Callable[[str], None] = lambda step: None) -> None:
        """Stop all parts in reverse order; a failure of one does not prevent the next.

        ``report`` is called with each slow step.
        """
        self._report = report
        self._ends.close()

    @abstractmethod
    def _start(self) -> None:
        """Start the parts."""

    def _lock(self) -> None:
        """Make the home directory and lock it."""
        home = self.settings.home_dir
        try:
            files.make_directory(home)
            self._ends.enter_context(lock(home))
        except filelock.Timeout:
            address = f" at {running.url}" if (running := find(home)) and running.url else ""
            raise StartError(f"osd already runs in {home}{address}; stop it, or set another home") from None
        except OSError as error:
            reason = f"home {home} cannot be written: {error.strerror}"
            raise StartError(f"{reason}; set home to a folder of this user") from error

    def _open(self) -> None:
        """Connect to Redis or start it."""
        self._ends.callback(discard_secrets, self.settings)
        self._report("starting Redis")
        handle = open_redis(self.settings)
        self._ends.callback(RedisSupervisor(handle.server).close if handle.server else handle.close)
        self.redis_url = handle.url
