"""Dashboard of a trainer without serving; it shows a server behind a tap, or a vLLM with capture, as a replica."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import FastAPI
from redis.exceptions import RedisError

from osd.config import Settings
from osd.metrics import Name
from osd.registry.replica_loads import ReplicaLoads, UpstreamReport
from serving import dashboard
from serving.access.guard import HostGuard, KeyGuard
from serving.api.admin import AdminRoutes
from serving.http import errors
from serving.metrics.report import Report, ServiceTotals, TracedDrafts
from serving.monitored import Monitored
from serving.served_model import ServedModel

logger = logging.getLogger(__name__)

_PERIOD = 1.0
_COUNTERS = {
    **{name: name for name in ("requests", "failed", "prompt_tokens", "completion_tokens", "rejected_versions")},
    **{name: name for name in ("rounds", "drafted", "accepted")},
    "captured": "traces_written",
    "dropped": "traces_dropped",
}
"""Counters of an upstream report, and their keys in a replica's report."""


class UpstreamCounts:
    """Counters of one upstream server since its first report; they continue when the server restarts."""

    def __init__(self, source: str) -> None:
        """Create the counters; ``source`` is the source of all draft tokens of the server."""
        self._source = source
        self._before: UpstreamReport | None = None
        self._counts: Counter[Name] = Counter()

    def report(self, name: str, now: UpstreamReport) -> Report:
        """Return the report ``now`` in the form of a replica's report.

        Its time is the current time, because the dashboard may have shown the second in which the tap sent it.
        """
        before, counts = self._before, self._counts
        if before is not None:
            counts.update(self._increments(before, now))
            counts["swaps"] += 0 < before.version != now.version  # 0: the version was not known yet
        self._before = now
        load: dict[Name, float] = {"running": now.running, "waiting": now.waiting}
        return Report(name, time.time(), now.version, True, dict(counts), load)

    def _increments(self, before: UpstreamReport, now: UpstreamReport) -> dict[Name, float]:
        counts: dict[Name, float] = {
            counter: _increment(getattr(before, name), getattr(now, name)) for name, counter in _COUNTERS.items()
        }
        earlier = itertools.chain(before.accepted_per_position, itertools.repeat(0))
        for position, (old, new) in enumerate(zip(earlier, now.accepted_per_position, strict=False)):
            counts["accepted_per_position", position] = _increment(old, new)
        counts["source_drafted", self._source] = counts["drafted"]
        counts["source_accepted", self._source] = counts["accepted"]
        if now.version == before.version:
            for name in ("rounds", "drafted", "accepted"):
                counts[f"version_{name}", now.domain, now.version] = counts[name]
        return counts


def _increment(before: int, now: int) -> int:
    """Return the increment of a counter; a counter that fell started again from 0."""
    return now - before if now >= before else now


class UpstreamService(Monitored):
    """Service whose replicas are upstream servers; a thread reads their reports once a second."""

    answers = False

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        model: ServedModel,
        live: Callable[[], Sequence[TracedDrafts]] = tuple,
    ) -> None:
        """Create the service; ``live`` returns the acceptance of traced requests."""
        super().__init__(settings, redis_url, None)
        self.model, self._live, self._loads = model, live, ReplicaLoads(redis_url)
        self._counts: dict[str, UpstreamCounts] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upstreams", daemon=True)
        self._thread.start()

    async def totals(self) -> ServiceTotals:
        return replace(await super().totals(), traced=await asyncio.to_thread(self._live))

    def close(self) -> None:
        """Stop the thread and close the connections."""
        self._stop.set()
        self._thread.join(5)
        self._loads.close()
        super().close()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD):
            try:
                reports = self._loads.upstreams()
            except RedisError as error:
                logger.debug("cannot read the reports of taps: %s", error)
                continue
            drafter = self.settings.drafter
            for name, report in reports.items():
                counts = self._counts.setdefault(name, UpstreamCounts((drafter.distilled or drafter).kind))
                self._push(counts.report(name, report))


def create_dashboard(service: UpstreamService, names: frozenset[str] | None) -> FastAPI:
    """Return the application of the dashboard, the metrics and the admin routes.

    Args:
        service: the data of the dashboard.
        names: host names that requests may use, in addition to loopback names; None allows every name.
    """
    app = errors.empty_app()
    for router in (AdminRoutes(service).router, dashboard.router(service)):
        app.include_router(router)
    app.add_api_route("/metrics", service.metrics)
    app.add_middleware(KeyGuard, keyring=service.access.keyring, open_paths=dashboard.OPEN_PATHS)
    if names is not None:
        app.add_middleware(HostGuard, names=names, setting="tap.allowed_hosts")
    return app
