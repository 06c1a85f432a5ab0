"""Metrics, dashboard and access of a replica, for all kinds of engines, or of a trainer without replicas."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import Response

from osd.config import Settings
from osd.registry.events import Events
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry
from serving.access.guard import Access
from serving.dashboard import data
from serving.metrics import exposition
from serving.metrics.history import Bins
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report, ServiceTotals
from serving.served_model import ServedModel

if TYPE_CHECKING:
    from serving.metrics.ray_metrics import RayMetrics  # imports Ray


class Monitored:
    """Metrics, dashboard and access of a process; subclasses set ``model``.

    Attributes:
        answers: whether the server of the dashboard also answers requests.

    Raises:
        osd.config.ConfigError: ``serving.keys_file`` is invalid.
    """

    model: ServedModel
    answers = True

    def __init__(self, settings: Settings, redis_url: str, shared: RayMetrics | None) -> None:
        """Open the connections; ``shared`` are the metrics of all replicas, None without a metrics actor."""
        self.settings, self.redis_url = settings, redis_url
        self._shared, self._local, self._lock = shared, ReplicaMetrics(), threading.Lock()
        self._registry, self._events = Registry(storage_of(settings)), Events(redis_url)
        self._feeds = data.Feeds(settings, redis_url, self._registry, self._events)
        self.access = Access(settings, redis_url, self._report_keys_refused)

    async def totals(self) -> ServiceTotals:
        """Return the counters of all replicas, or those of this process if the metrics actor cannot be reached."""
        totals = None if self._shared is None else await self._shared.totals()
        if totals is None:
            with self._lock:
                totals = self._local.totals(time.time())
        return replace(totals, **(await asyncio.to_thread(self._feeds.trainer))._asdict())

    async def metrics(self) -> Response:
        """Handle ``GET /metrics``: return Prometheus text, summed over all replicas."""
        totals = await self.totals()
        # Rendering takes milliseconds, so it must not block the event loop.
        text = await asyncio.to_thread(self._render, totals)
        return Response(text, media_type=exposition.CONTENT_TYPE)

    async def dashboard_state(self) -> dict[str, Any]:
        """Return the current state for the dashboard, as JSON."""
        totals, feeds = await self.totals(), await asyncio.to_thread(self._feeds.read)
        return data.compose(self.settings, self.model, totals, feeds, self.answers)

    async def dashboard_versions(self, domain: str) -> dict[str, Any]:
        """Return the versions of a domain for the dashboard, as JSON.

        Raises:
            ValueError: the domain does not exist.
            redis.exceptions.RedisError: Redis does not answer.
            OSError: the registry cannot be read.
        """
        totals = await self.totals()
        return data.compose_domain(self.settings, totals, await asyncio.to_thread(self._feeds.of, domain))

    async def dashboard_bins(self, seconds: int, since: int | None) -> Bins:
        """Return the history of all replicas, or of this process alone if the metrics actor cannot be reached.

        Args:
            seconds: length of the window that ends now.
            since: start of the last bin that the caller has; only later bins are returned. None returns all.
        """
        bins = None if self._shared is None else await self._shared.bins(seconds, since)
        if bins is None:
            with self._lock:
                bins = self._local.bins(time.time(), seconds, since)
        return bins

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._feeds, self.access, self._events):
            connection.close()

    def _push(self, report: Report) -> float:
        """Deliver a report of this replica, and return the seconds until the next one."""
        with self._lock:
            pause = self._local.push(report)
        shared_pause = None if self._shared is None else self._shared.push(report)
        return shared_pause or pause

    def _render(self, totals: ServiceTotals) -> bytes:
        return exposition.render(totals, self.settings.domain, self.model.id)

    def _report_keys_refused(self, reason: str) -> None:
        self._events.try_add("keys_refused", self.settings.domain, reason=reason)
