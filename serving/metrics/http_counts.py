"""What a proxy answered, by path and status, counted in the proxy and delivered to those who keep all metrics.

Only the proxy knows all of it: what it refuses itself never comes to a replica.
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


COUNTS: Counter[tuple[str, int]] = Counter()
"""Answers of this process by template of the path and status; only its event loop counts."""


class Delivery:
    """Tells all counts of this process each second, from a thread, as long as it answers requests under Ray Serve."""

    def __init__(self, counts: Counter[tuple[str, int]], keeper: str) -> None:
        """Tell ``counts`` to the actors whose names end with ``keeper``."""
        self._counts, self._keeper = counts, keeper
        self._name = f"proxy-{uuid.uuid4().hex}"
        self._actors: list[Any] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not begun yet."""
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
        """Report these counts; a keeper that does not answer is looked up again the next time."""
        # The proxy runs in Ray; whoever only has its middleware does not import that.
        import ray

        if not ray.is_initialized():
            return
        try:
            self._actors = self._actors or self._found()
            ray.get([actor.answered.remote(self._name, counted) for actor in self._actors], timeout=_ANSWER_SECONDS)
        except Exception as error:
            # It died, its application has gone, or it is of an older version: another one is looked for.
            logger.debug("what was answered cannot be told now: %s", type(error).__name__)
            self._actors = []

    def _found(self) -> list[Any]:
        import ray
        from ray.util import list_named_actors

        named: list[Any] = list_named_actors(all_namespaces=True)  # Ray's types say names alone
        mine = [one for one in named if one["name"].endswith(f"::{self._keeper}")]
        return [ray.get_actor(one["name"], one["namespace"]) for one in mine]
