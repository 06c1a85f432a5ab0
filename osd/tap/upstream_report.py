"""Reports of a tap to trainers and the dashboard: running requests, and metrics of the upstream server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx2
import msgspec
from redis.exceptions import RedisError

from osd.config import Settings
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads, UpstreamReport
from osd.registry.upstream_metrics import CAPTURING, report_of
from osd.scrape import Scrape
from osd.tap.metrics import TapMetrics

logger = logging.getLogger(__name__)

_LOAD_SECONDS, _SCRAPE_SECONDS = 0.5, 1.0
_PATIENCE = 2.0  # seconds; a server under load answers late
_MOST_BYTES = 16 << 20


@dataclass
class TapReporter:
    """Two threads that report the load and the upstream until ``close``.

    The threads are separate, so that an upstream that hangs does not delay the report of running requests.
    """

    settings: Settings
    redis_url: str
    url: str
    metrics: TapMetrics
    captured: Callable[[], Mapping[str, int]]
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._name = f"tap {self.settings.tap.host}:{self.settings.tap.port}"
        self._latest = UpstreamReport(time.time(), self.settings.domain)
        self._threads = [
            threading.Thread(target=target, name=f"tap-{name}", daemon=True)
            for name, target in (("load", self._report_load), ("upstream", self._report_upstream))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop both threads, and wait a few seconds at most for each to end."""
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * _PATIENCE)

    def _report_load(self) -> None:
        """Report the running requests; trainers yield the CPU to them."""
        with ReplicaLoads(self.redis_url) as loads:
            while not self._closed.wait(_LOAD_SECONDS):
                load = ReplicaLoad(self.metrics.in_flight, 0, self._latest.version, 0.0)
                _ignore_redis_errors(lambda load=load: loads.report(self._name, load))

    def _report_upstream(self) -> None:
        with ReplicaLoads(self.redis_url) as loads, httpx2.Client(timeout=_PATIENCE, trust_env=False) as client:
            while not self._closed.wait(_SCRAPE_SECONDS):
                self._latest = self._read_upstream(client)
                _ignore_redis_errors(lambda: loads.report_upstream(self._name, self._latest))

    def _read_upstream(self, client: httpx2.Client) -> UpstreamReport:
        scrape = _scrape(client, self.url)
        # Keep the last counts while the upstream does not answer: it may not have restarted.
        known = self._latest if scrape is None else _report_of(scrape, self.settings.domain)
        (requests, failed), captured = self.metrics.answered(), self.captured()
        return msgspec.structs.replace(
            known,
            time=time.time(),
            running=known.running or self.metrics.in_flight,
            requests=requests,
            failed=failed,
            captured=captured["written"],
            dropped=captured["dropped"],
        )


def _report_of(scrape: Scrape, domain: str) -> UpstreamReport:
    """Return the report of the upstream; a vLLM that was started with capture also reports itself."""
    return msgspec.structs.replace(report_of(scrape, domain), traced=CAPTURING in scrape.values)


def _scrape(client: httpx2.Client, url: str) -> Scrape | None:
    try:
        with client.stream("GET", f"{url}/metrics") as answer:
            if answer.status_code != 200:
                return Scrape()
            text = b""
            for part in answer.iter_bytes():
                text += part
                if len(text) > _MOST_BYTES:
                    return Scrape()
        return Scrape.of(text.decode(), time.time())
    except httpx2.HTTPError:
        return None
    except ValueError:  # another format than Prometheus text
        return Scrape()


def _ignore_redis_errors(report: Callable[[], object]) -> None:
    try:
        report()
    except RedisError as error:
        logger.debug("a report of the tap was not written, Redis does not answer: %s", error)
