"""A trainer's start stands back for the service's own: whoever asks first is not to wait for its imports."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from redis.exceptions import RedisError

from osd.registry.replica_loads import ReplicaLoads

_LONGEST_SECONDS, _LOOK_SECONDS = 5.0, 0.2


def await_first_token(redis_url: str, stop: threading.Event) -> None:
    """Return when a replica decodes, when there is none that could, after five seconds, or with ``stop``."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    with ReplicaLoads(redis_url) as loads, suppress(RedisError):
        while (replicas := loads.read()) and not any(load.tokens_per_second for load in replicas.values()):
            if time.monotonic() > deadline or stop.wait(_LOOK_SECONDS):
                return
