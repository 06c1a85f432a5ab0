"""That some pointer has moved: whoever watches is told by Redis, and need not ask it all the time."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import redis
from redis.exceptions import RedisError

_CHANNEL = "osd:rollouts"
_SLICE_SECONDS = 0.5  # within which ``stop`` is seen
LOOK_SECONDS = 5.0
"""Between two looks, at most, where nobody tells of a move."""


def tell(client: Any) -> None:
    """Have all who ``wait`` look; ``client`` may be a pipeline."""
    client.publish(_CHANNEL, b"")


class News:
    """One subscription, for one thread; leaving it as a context ends it."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._channel: Any = None

    def __enter__(self) -> News:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def wait(self, stop: threading.Event, interval: float) -> None:
        """Return when it is time to look: a pointer has moved, five seconds are over at most, or ``stop`` is set.

        While Redis does not tell, that is after ``interval`` seconds. It is time at once when Redis has just been asked
        to tell, as nobody was told of what moved before.
        """
        end = time.monotonic() + LOOK_SECONDS * random.uniform(0.5, 1)  # noqa: S311  no secret
        try:
            if self._channel is None:
                channel = self._client.pubsub(ignore_subscribe_messages=True)
                channel.subscribe(_CHANNEL)
                self._channel = channel
                return
            while not stop.is_set() and (left := end - time.monotonic()) > 0:
                if self._channel.get_message(timeout=min(left, _SLICE_SECONDS)) is not None:
                    return
        except (RedisError, OSError):
            self._leave()
            stop.wait(interval)

    def _leave(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(RedisError, OSError):
                self._channel.close()
        self._channel = None
