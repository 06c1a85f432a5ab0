"""Client of the Ray actor with the metrics of all replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.exceptions import RayServeException

from serving.metrics.history import Bins
from serving.metrics.http_counts import ACTOR
from serving.metrics.report import Report, ServiceTotals

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 2.0


class RayMetrics:
    """Metrics of all replicas in a Ray actor; methods return None while the actor cannot be reached."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._failing = False

    def push(self, report: Report) -> float | None:
        """Deliver a report within two seconds; return the seconds until the next report."""
        try:
            pause: float = ray.get(self._actor().push.remote(report), timeout=_ANSWER_SECONDS)
        except (RayError, RayServeException, GetTimeoutError, ValueError) as error:
            self._handle_failure(error)
            return None
        self._failing = False
        return pause

    async def totals(self) -> ServiceTotals | None:
        """Return the counters of all replicas."""
        return await self._call("totals", time.time())

    async def bins(self, seconds: int, since: int | None) -> Bins | None:
        """Return the history over the last ``seconds``, without the bins up to ``since``."""
        return await self._call("bins", time.time(), seconds, since)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            reference = getattr(self._actor(), method).remote(*arguments)
            return await asyncio.wait_for(reference, _ANSWER_SECONDS)
        except (RayError, RayServeException, TimeoutError, ValueError) as error:
            self._handle_failure(error)
            return None

    def _actor(self) -> Any:
        # Serve replaces an actor that died, so look it up again after a failure.
        if self._handle is None:
            self._handle = serve.get_deployment_actor(ACTOR)
        return self._handle

    def _handle_failure(self, error: Exception) -> None:
        self._handle = None
        if not self._failing:
            logger.warning("cannot reach the metrics actor of the replicas: %s", type(error).__name__)
        self._failing = True
