"""Reports of a vLLM with capture to trainers and the dashboard: running requests, and metrics of the server."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads, UpstreamReport
from osd.registry.upstream_metrics import report_of
from osd.scrape import Scrape
from osd.vllm.published import PublishedDrafter
from osd.vllm.settings import REDIS_URL, SettingsError, VllmSettings

log = logging.getLogger("vllm.osd")  # vLLM shows the lines of its own loggers only

_PERIOD = 0.5
_ENDED, _TRACES, _DROPPED = "vllm:request_success_total", "osd_capture_traces_total", "osd_capture_dropped_total"
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class Reporting:
    """Reports from the metrics of this process, as a tap writes them from ``/metrics``.

    The load lets trainers of this machine keep to ``trainer.duty`` while requests run. vLLM has no figure for the
    seconds of its steps, so it reports no work, and training has no fund.
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
        self._failing = False

    async def run(self) -> None:
        """Report until the task is cancelled; after an error try again."""
        with self._loads:
            while True:
                try:
                    await asyncio.to_thread(self._report)
                    self._failing = False
                except Exception as error:  # Redis fails: try again
                    if not self._failing:
                        log.warning("this server is not reported for now: %s", " ".join(str(error).split()))
                    self._failing = True
                await asyncio.sleep(_PERIOD)

    def _report(self) -> None:
        report = read_report(self._domain)
        self._loads.report_upstream(self._name, report)
        # As in a tap's report: requests in vLLM's queue count as running, because a busy vLLM always has some.
        load = ReplicaLoad(report.running + report.waiting, 0, report.version, 0.0)
        self._loads.report(self._name, load)


def read_report(domain: str) -> UpstreamReport:
    """Return the report of this server from its metrics; ``domain`` is the domain of its drafter."""
    registry = REGISTRY
    if _MULTIPROCESS in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    scrape = Scrape.of_families(registry.collect(), time.time())
    return msgspec.structs.replace(
        report_of(scrape, domain),
        requests=int(scrape.sum(_ENDED)),
        failed=int(scrape.sum(_ENDED, finished_reason="error")),
        captured=int(scrape.sum(_TRACES)),
        dropped=int(scrape.sum(_DROPPED)),
    )
