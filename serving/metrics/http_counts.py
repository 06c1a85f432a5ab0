"""Counts of HTTP answers by path and status, which each proxy reports to the metrics actors.

The proxy counts them, because replicas do not see the requests that the proxy refuses.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)

_DELIVER_SECONDS = 1.0
_ANSWER_SECONDS = 2.0


ACTOR = "replica_metrics"
"""Name of the actor that keeps the metrics of all replicas and proxies."""

COUNTS: Counter[tuple[str, int]] = Counter()
"""Answers of this process by path template and status; only the event loop changes them."""


class Delivery:
    """Thread that reports all counts of this process to the metrics actors each second."""

    def __init__(self, counts: Counter[tuple[str, int]], actor_name: str) -> None:
        """Create the thread for ``counts`` and the actors with the deployment-actor name ``actor_name``."""
        self._counts, self._actor_name = counts, actor_name
        self._name = f"proxy-{uuid.uuid4().hex}"
        self._actors: list[Any] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it is running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="http-counts", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_DELIVER_SECONDS)
            counted = dict(self._counts)
            if counted:
                self.deliver(counted)

    def deliver(self, counted: dict[tuple[str, int], int]) -> None:
        """Report these counts; after an error the actors are looked up again at the next call."""
        # Importing the middleware alone must not import Ray.
        import ray

        if not ray.is_initialized():
            return
        try:
            self._actors = self._actors or self._find_actors()
            ray.get([actor.answered.remote(self._name, counted) for actor in self._actors], timeout=_ANSWER_SECONDS)
        except Exception as error:
            # The actor died, its application was deleted, or it has an older version of the code.
            logger.debug("cannot report the HTTP answers: %s", type(error).__name__)
            self._actors = []

    def _find_actors(self) -> list[Any]:
        import ray
        from ray.util import list_named_actors

        named: list[Any] = list_named_actors(all_namespaces=True)  # Ray declares a list of names here
        actors = [actor for actor in named if actor["name"].endswith(f"::{self._actor_name}")]
        return [ray.get_actor(actor["name"], actor["namespace"]) for actor in actors]
