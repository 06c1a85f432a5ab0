"""The dashboard of a trainer without serving: each server behind a tap is shown like a replica."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from redis.exceptions import RedisError

from osd.config import Settings
from osd.metrics import Name
from osd.registry.events import Events
from osd.registry.object_storage import storage_of
from osd.registry.replica_loads import ReplicaLoads, UpstreamReport
from osd.registry.versions import Registry
from serving import dashboard
from serving.access.guard import Access, HostGuard, KeyGuard
from serving.api.admin import AdminRoutes
from serving.dashboard import data
from serving.http import errors
from serving.metrics.history import Bins
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report, Totals
from serving.service import Model

logger = logging.getLogger(__name__)

_PERIOD = 1.0
_COUNTERS = {
    **{name: name for name in ("requests", "failed", "prompt_tokens", "completion_tokens", "rejected_versions")},
    **{name: name for name in ("rounds", "drafted", "accepted")},
    "captured": "traces_written",
    "dropped": "traces_dropped",
}
"""What a tap tells, and what a replica calls it."""


class Counted:
    """What one server has counted since it was first heard of, however often it was started anew; ``source`` drafts."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._before: UpstreamReport | None = None
        self._counts: Counter[Name] = Counter()

    def report(self, name: str, now: UpstreamReport) -> Report:
        """The next report, as one of a replica, of the moment in which it is heard.

        That in which it was told may be of a second which the dashboard has already shown.
        """
        before, counts = self._before, self._counts
        if before is not None:
            counts.update(self._since(before, now))
            counts["swaps"] += now.version != before.version
        self._before = now
        load: dict[Name, float] = {"running": now.running, "waiting": now.waiting}
        return Report(name, time.time(), now.version, True, dict(counts), load)

    def _since(self, before: UpstreamReport, now: UpstreamReport) -> dict[Name, float]:
        found: dict[Name, float] = {
            counter: _grown(getattr(before, name), getattr(now, name)) for name, counter in _COUNTERS.items()
        }
        earlier = itertools.chain(before.accepted_per_position, itertools.repeat(0))
        for place, (was, is_now) in enumerate(zip(earlier, now.accepted_per_position, strict=False)):
            found["accepted_per_position", place] = _grown(was, is_now)
        found["source_drafted", self._source] = found["drafted"]
        found["source_accepted", self._source] = found["accepted"]
        if now.version == before.version:
            for name in ("rounds", "drafted", "accepted"):
                found[f"version_{name}", now.domain, now.version] = found[name]
        return found


def _grown(before: int, now: int) -> int:
    """By how much a count grew; one that fell began anew."""
    return now - before if now >= before else now


class UpstreamService:
    """Reads what taps tell once a second, on a thread of its own until ``close``; see ``serving.service.Watched``."""

    def __init__(self, settings: Settings, redis_url: str, model: Model) -> None:
        self.settings, self.model, self.redis_url = settings, model, redis_url
        self._loads, self._events = ReplicaLoads(redis_url), Events(redis_url)
        self.access = Access(settings, redis_url, self._refused)
        self._feeds = data.Feeds(settings, redis_url, Registry(storage_of(settings)), self._events)
        self._counted: dict[str, Counted] = {}
        self._metrics, self._lock, self._over = ReplicaMetrics(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="upstreams", daemon=True)
        self._thread.start()

    async def totals(self) -> Totals:
        """See ``Watched``."""
        with self._lock:
            totals = self._metrics.totals(time.time())
        feed = await asyncio.to_thread(self._feeds.trainer)
        return replace(totals, **feed._asdict())

    async def dashboard_state(self) -> dict[str, Any]:
        """See ``Watched``."""
        totals, feeds = await self.totals(), await asyncio.to_thread(self._feeds.read)
        return data.compose(self.settings, self.model, totals, feeds, answers=False)

    async def dashboard_versions(self, domain: str) -> dict[str, Any]:
        """See ``Watched``."""
        totals = await self.totals()
        return data.compose_domain(self.settings, totals, await asyncio.to_thread(self._feeds.of, domain))

    async def dashboard_bins(self, seconds: int, since: int | None) -> Bins:
        """See ``Watched``."""
        with self._lock:
            return self._metrics.bins(time.time(), seconds, since)

    def close(self) -> None:
        """Read no more."""
        self._over.set()
        self._thread.join(5)
        for connection in (self._feeds, self.access, self._loads, self._events):
            connection.close()

    def _follow(self) -> None:
        while not self._over.wait(_PERIOD):
            try:
                told = self._loads.upstreams()
            except RedisError as error:
                logger.debug("upstreams cannot be read: %s", error)
                continue
            drafter = self.settings.drafter
            with self._lock:
                for name, report in told.items():
                    counted = self._counted.setdefault(name, Counted((drafter.distilled or drafter).kind))
                    self._metrics.push(counted.report(name, report))

    def _refused(self, reason: str) -> None:
        self._events.tell("keys_refused", self.settings.domain, None, reason=reason)


def create_dashboard(service: UpstreamService, names: frozenset[str] | None) -> FastAPI:
    """The dashboard's application and what operators may do, asked under ``names`` beside loopback's, None for any."""
    app = FastAPI(title="osd", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    for router in (AdminRoutes(service).router, dashboard.router(service)):
        app.include_router(router)
    app.add_middleware(KeyGuard, keyring=service.access.keyring, open_paths=dashboard.OPEN_PATHS)
    if names is not None:
        app.add_middleware(HostGuard, names=names, setting="tap.allowed_hosts")
    return app
