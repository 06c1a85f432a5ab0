"""Metrics, dashboard and access of a replica with vLLM."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fastapi import Response
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from osd.config import Settings
from osd.metrics import Name
from osd.registry.events import Events
from osd.registry.object_storage import storage_of
from osd.registry.replica_loads import UpstreamReport
from osd.registry.versions import Registry
from osd.vllm.reporting import read_report
from serving.access.guard import Access
from serving.dashboard import data
from serving.dashboard.upstream_service import UpstreamCounts
from serving.metrics import exposition
from serving.metrics.history import Bins
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report, ServiceTotals
from serving.replica.replica import SharedMetrics
from serving.service import ServedModel

logger = logging.getLogger(__name__)

_PERIOD = 1.0
_NATIVE = "vllm"
"""First part of the names of vLLM's own counters in reports."""

_KINDS = {"counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
_PREFIX, _CREATED = "vllm:", "_created"  # times of creation cannot be summed


class VllmService:
    """Implementation of ``serving.service.MonitoredService``; a thread reports vLLM's counters once a second."""

    def __init__(
        self, settings: Settings, redis_url: str, name: str, model: ServedModel, engine: Any, shared: SharedMetrics
    ) -> None:
        """Start to report as the replica ``name``.

        Args:
            settings: settings of the service.
            redis_url: the Redis of the service.
            name: name of the replica.
            model: the served model.
            engine: vLLM's client of its engine.
            shared: metrics of all replicas.
        """
        self.settings, self.redis_url, self.model = settings, redis_url, model
        self._name, self._engine, self._shared, self._local = name, engine, shared, ReplicaMetrics()
        self._events = Events(redis_url)
        self.access = Access(settings, redis_url, self._report_keys_refused)
        self._feeds = data.Feeds(settings, redis_url, Registry(storage_of(settings)), self._events)
        self._counts = UpstreamCounts(settings.drafter.distilled.kind)
        # The counters of a report are increments, and the first report counts from the start of vLLM.
        self._counts.report(name, UpstreamReport(0.0, settings.domain))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counter-reporter", daemon=True)
        self._thread.start()

    async def check_health(self) -> None:
        """Raise an error if vLLM's engine has ended."""
        await self._engine.check_health()

    async def totals(self) -> ServiceTotals:
        """Return the counters of all replicas, or of this replica if the metrics actor cannot be reached."""
        totals = await self._shared.totals() or self._local.totals(time.time())
        return replace(totals, **(await asyncio.to_thread(self._feeds.trainer))._asdict())

    async def metrics(self) -> Response:
        """Return Prometheus text, summed over all replicas."""
        totals = await self.totals()
        text = await asyncio.to_thread(self._render, totals)
        return Response(text, media_type=exposition.CONTENT_TYPE)

    async def dashboard_state(self) -> dict[str, Any]:
        """Return the current state; see ``MonitoredService``."""
        totals, feeds = await self.totals(), await asyncio.to_thread(self._feeds.read)
        return data.compose(self.settings, self.model, totals, feeds)

    async def dashboard_versions(self, domain: str) -> dict[str, Any]:
        """Return the versions of a domain; see ``MonitoredService``."""
        totals = await self.totals()
        return data.compose_domain(self.settings, totals, await asyncio.to_thread(self._feeds.of, domain))

    async def dashboard_bins(self, seconds: int, since: int | None) -> Bins:
        """Return the history of all replicas, or of this replica if the metrics actor cannot be reached."""
        return await self._shared.bins(seconds, since) or self._local.bins(time.time(), seconds, since)

    def report(self) -> Report:
        """Return the current report of this replica."""
        report = self._counts.report(self._name, read_report(self.settings.domain))
        return replace(report, counters={**report.counters, **native_counters()})

    def close(self) -> None:
        """Stop the thread and close the connections."""
        self._stop.set()
        self._thread.join(5)
        for connection in (self._feeds, self.access, self._events):
            connection.close()

    def _run(self) -> None:
        pause = _PERIOD
        while not self._stop.wait(pause):
            try:
                report = self.report()
                local = self._local.push(report)
                pause = self._shared.push(report) or local
            except Exception:  # vLLM registers new metrics while they are read: report again in a second
                logger.exception("the counters of vLLM cannot be reported")

    def _render(self, totals: ServiceTotals) -> bytes:
        families = native_families(totals.counters)
        return exposition.render(totals, self.settings.domain, self.model.id, families)

    def _report_keys_refused(self, reason: str) -> None:
        self._events.try_add("keys_refused", self.settings.domain, None, reason=reason)


def native_counters() -> dict[Name, float]:
    """Return vLLM's counters and histograms in this process; the names have the family, the sample and its labels."""
    counters: dict[Name, float] = {}
    for family in _families():
        for sample in family.samples:
            if not sample.name.endswith(_CREATED):
                labels = (part for label in sorted(sample.labels.items()) for part in label)
                counters[_NATIVE, family.name, sample.name, *labels] = sample.value
    return counters


def native_families(counters: Mapping[Name, float]) -> list[Family]:
    """Return vLLM's counters and histograms with the values of all replicas; see ``native_counters``."""
    families = {family.name: _KINDS[family.type](family.name, family.documentation) for family in _families()}
    for name, value in counters.items():
        if isinstance(name, tuple) and name[0] == _NATIVE and name[1] in families:
            parts = [str(part) for part in name[2:]]
            families[str(name[1])].add_sample(parts[0], dict(zip(parts[1::2], parts[2::2], strict=True)), value)
    return list(families.values())


def _families() -> Iterator[Family]:
    return (family for family in REGISTRY.collect() if family.name.startswith(_PREFIX) and family.type in _KINDS)
