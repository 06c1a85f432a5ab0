"""Keeps the Redis server that osd started alive."""

from __future__ import annotations

import logging
import threading

from osd.capture.server import RedisError, RedisServer
from osd.redis_client import Backoff

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


class RedisSupervisor:
    """Starts a server again when it ends by itself, empty and under the same URL, until ``close``.

    A thread does, which lives as long as the server that it started.
    """

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis-supervisor", daemon=True)
        self._thread.start()

    def __enter__(self) -> RedisSupervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server."""
        self._stop.set()
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.wait(max(_LOOK_SECONDS, backoff.remaining)):
            if self._server.pid is not None:
                backoff.worked()
                continue
            if not backoff.failing:
                logger.warning("redis-server ended by itself, starting it again")
            try:
                self._server.start()
            except (RedisError, OSError) as error:
                logger.warning("it does not start, trying again: %s", error)
                backoff.failed()
