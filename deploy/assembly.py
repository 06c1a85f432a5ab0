"""Parts that run together on one machine: started together, stopped together, one assembly in a home directory."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import filelock

from osd.capture.server import RedisError, RedisSupervisor, open_redis
from osd.config import ConfigError, Settings
from osd.running import lock
from osd.target.load import TargetError


class StartError(RuntimeError):
    """An assembly cannot start here; the message is one line that names what to change."""


class RayDied(Exception):
    """A server of Ray ended by itself; the message is one line that says which."""


START_ERRORS = (StartError, ConfigError, TargetError, RedisError)
"""What keeps an assembly from starting; each is one line that names what to change."""


class Assembly(ABC):
    """Runs from ``start`` (or entering) to ``stop`` (or leaving); each part has its end in ``_ends``."""

    def __init__(self, settings: Settings, report: Callable[[str], None] = lambda step: None) -> None:
        """``report`` is told what it waits for."""
        self.settings, self.redis_url = settings, ""
        self._report = report
        self._ends = contextlib.ExitStack()

    def start(self) -> None:
        """Return when all of it runs; if that fails, everything that was started is ended again.

        Must be called on the main thread: the Redis server lives and dies with it.

        Raises:
            StartError: the home directory is in use, or a part does not come up.
            TargetError: the target cannot be had.
            RedisError: there is no Redis.
            ConfigError: settings contradict each other, or do not fit the target.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, report: Callable[[str], None] = lambda step: None) -> None:
        """End everything, last started first; every step is tried whatever became of the others.

        ``report`` is told what it waits for.
        """
        self._report = report
        self._ends.close()

    @abstractmethod
    def _start(self) -> None:
        """Start the parts."""

    def _open(self) -> None:
        """Take the home directory, and have a Redis: what all other parts need."""
        home = self.settings.home_dir
        home.mkdir(parents=True, exist_ok=True)
        try:
            self._ends.enter_context(lock(home))
        except filelock.Timeout:
            raise StartError(f"osd already runs in {home}; stop it, or set another home") from None
        self._report("starting Redis")
        handle = open_redis(self.settings)
        self._ends.callback(RedisSupervisor(handle.server).close if handle.server else handle.close)
        self.redis_url = handle.url
