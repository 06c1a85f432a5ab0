"""Reports of a vLLM with capture to trainers and the dashboard: running requests, and metrics of the server."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads, UpstreamReport
from osd.registry.upstream_metrics import SERVERS, report_of
from osd.scrape import Scrape, Span
from osd.vllm.published import PublishedDrafter
from osd.vllm.repetition import repeat
from osd.vllm.settings import REDIS_URL, SettingsError, VllmSettings

_PERIOD = 0.5
_ENDED, _TRACES, _DROPPED = "vllm:request_success_total", "osd_capture_traces_total", "osd_capture_dropped_total"
_BETWEEN, _FIRST = "vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds_count"
_STEPS = "vllm:iteration_tokens_total"
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class StepTotals:
    """Decoding steps since the first reading of the metrics, which have no figure for the seconds of a step.

    Each step gives tokens to every request that decodes, so the mean time between them is the mean duration of a step.

    Attributes:
        steps: the number of steps.
        rows: the number of rows of these steps, rejected draft tokens included.
        seconds: the duration of these steps.
        inter_token_ms: the mean time between two tokens of a request, in the time between the last two readings.
    """

    def __init__(self) -> None:
        self.steps = self.rows = 0
        self.seconds = self.inter_token_ms = 0.0
        self._before: Scrape | None = None

    def read(self, scrape: Scrape) -> None:
        """Add the steps since the last reading."""
        span, self._before = Span(self._before or scrape, scrape), scrape
        names = SERVERS["vllm"].fields
        waited, times = span.added(f"{_BETWEEN}_sum"), span.added(f"{_BETWEEN}_count")
        tokens = span.added(names["completion_tokens"]) - span.added(_FIRST)
        self.inter_token_ms = 1000 * waited / tokens if tokens > 0 else 0.0
        if times:
            steps = int(span.added(f"{_STEPS}_count"))
            rejected = span.added(names["drafted"]) - span.added(names["accepted"])
            self.steps += steps
            self.rows += int(span.added(f"{_STEPS}_sum") + max(rejected, 0.0))
            self.seconds += steps * waited / times


class Reporting:
    """Reports from the metrics of this process, as a tap writes them from ``/metrics``.

    The load lets trainers of this machine pause while a request waits or tokens come too slowly, and keep to
    ``trainer.duty`` while requests run. vLLM compares no two versions within its steps, so nothing measures what a
    version saves. It therefore reports no work, and training has no fund: a fund without savings would end it.
    """

    def __init__(self, engine: Any, settings: VllmSettings) -> None:
        """Report on ``engine``, vLLM's client of its engine.

        Raises:
            SettingsError: there is no Redis, no registry or no exported drafter.
        """
        if settings.redis_url is None:
            raise SettingsError(f"{REDIS_URL} must name the Redis of osd learn --capture")
        speculative = engine.vllm_config.speculative_config
        self._domain = PublishedDrafter(settings, None if speculative is None else speculative.model).domain
        try:
            self._loads = ReplicaLoads(settings.redis_url)
        except ValueError:
            # The message of the parser may quote a part of the password.
            raise SettingsError(f"{REDIS_URL} is not a Redis URL") from None
        # Several HTTP processes of one server have their metrics in common, and so report under one name.
        process = os.getppid() if _MULTIPROCESS in os.environ else os.getpid()
        self._name = f"vllm {socket.gethostname()}:{process}"
        self._steps = StepTotals()

    async def run(self) -> None:
        """Report until the task is cancelled; after an error try again."""
        with self._loads:
            await repeat(lambda: asyncio.to_thread(self._report), _PERIOD, "this server is not reported")

    def _report(self) -> None:
        scrape, steps = read_metrics(), self._steps
        steps.read(scrape)
        report = _report_of(scrape, self._domain)
        self._loads.report_upstream(self._name, report)
        load = ReplicaLoad(
            running=report.running,
            waiting=report.waiting,
            drafter_version=report.version,
            tokens_per_second=0.0,
            inter_token_ms=steps.inter_token_ms,
            steps=steps.steps,
            rows=steps.rows,
            step_seconds=steps.seconds,
        )
        self._loads.report(self._name, load)


def read_metrics() -> Scrape:
    """Return the metrics of this server."""
    registry = REGISTRY
    if _MULTIPROCESS in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    return Scrape.of_families(registry.collect(), time.time())


def read_report(domain: str) -> UpstreamReport:
    """Return the report of this server from its metrics; ``domain`` is the domain of its drafter."""
    return _report_of(read_metrics(), domain)


def _report_of(scrape: Scrape, domain: str) -> UpstreamReport:
    return msgspec.structs.replace(
        report_of(scrape, domain),
        requests=int(scrape.sum(_ENDED)),
        failed=int(scrape.sum(_ENDED, finished_reason="error")),
        captured=int(scrape.sum(_TRACES)),
        dropped=int(scrape.sum(_DROPPED)),
    )
