"""Metrics, dashboard and access of a replica with vLLM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from osd.config import Settings
from osd.metrics import Name
from osd.registry.replica_loads import UpstreamReport
from osd.vllm.reporting import read_report
from serving.dashboard.upstream_service import UpstreamCounts
from serving.metrics import exposition
from serving.metrics.report import Report, ServiceTotals
from serving.monitored import Monitored
from serving.served_model import ServedModel

if TYPE_CHECKING:
    from serving.metrics.ray_metrics import RayMetrics  # imports Ray

logger = logging.getLogger(__name__)

_PERIOD = 1.0
_NATIVE = "vllm"
"""First part of the names of vLLM's own counters in reports."""

_KINDS = {"counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
_PREFIX, _CREATED = "vllm:", "_created"  # times of creation cannot be summed


class VllmService(Monitored):
    """Metrics, dashboard and access of a replica with vLLM; a thread reports vLLM's counters once a second."""

    def __init__(
        self, settings: Settings, redis_url: str, name: str, model: ServedModel, engine: Any, shared: RayMetrics
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
        super().__init__(settings, redis_url, shared)
        self.model, self._name, self._engine = model, name, engine
        self._counts = UpstreamCounts(settings.drafter.distilled.kind)
        # The counters of a report are increments, and the first report counts from the start of vLLM.
        self._counts.report(name, UpstreamReport(0.0, settings.domain))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counter-reporter", daemon=True)
        self._thread.start()

    async def check_health(self) -> None:
        """Raise an error with one sentence as its message if vLLM's engine has ended."""
        try:
            await self._engine.check_health()
        except Exception as error:
            raise RuntimeError("vLLM's engine has ended") from error

    def report(self) -> Report:
        """Return the current report of this replica."""
        report = self._counts.report(self._name, read_report(self.settings.domain))
        return replace(report, counters={**report.counters, **native_counters()})

    def close(self) -> None:
        """Stop the thread and close the connections."""
        self._stop.set()
        self._thread.join(5)
        super().close()

    def _run(self) -> None:
        pause = _PERIOD
        while not self._stop.wait(pause):
            try:
                pause = self._push(self.report())
            except Exception:  # vLLM registers new metrics while they are read: report again in a second
                logger.exception("the counters of vLLM cannot be reported")

    def _render(self, totals: ServiceTotals) -> bytes:
        families = native_families(totals.counters)
        return exposition.render(totals, self.settings.domain, self.model.id, families)


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
