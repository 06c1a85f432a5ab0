"""What a tap tells trainers and the dashboard: how many requests run, and what the server behind it says of itself."""

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
from osd.scrape import Scrape
from osd.tap.metrics import TapMetrics

logger = logging.getLogger(__name__)

_LOAD_SECONDS, _LOOK_SECONDS = 0.5, 1.0
_PATIENCE = 2.0  # in seconds; a server under load answers late, and its requests are not to wait for this
_MOST_BYTES = 16 << 20
_VERSION, _REJECTED = "osd_draft_version", "osd_draft_rejected_total"  # of a vLLM that follows the registry


@dataclass(frozen=True)
class Names:
    """What a kind of server calls the ``fields`` of an ``UpstreamReport``, and its metric by ``position``, if any."""

    fields: Mapping[str, str]
    position: str | None = None


SERVERS = {
    "vllm": Names(
        {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "prompt_tokens": "vllm:prompt_tokens_total",
            "completion_tokens": "vllm:generation_tokens_total",
            "rounds": "vllm:spec_decode_num_drafts_total",
            "drafted": "vllm:spec_decode_num_draft_tokens_total",
            "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        },
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    "sglang": Names(
        {
            "running": "sglang:num_running_reqs",
            "waiting": "sglang:num_queue_reqs",
            "prompt_tokens": "sglang:prompt_tokens_total",
            "completion_tokens": "sglang:generation_tokens_total",
        }
    ),
}
"""The servers whose ``/metrics`` are read; of others the tap tells what it counts itself."""


def report_of(scrape: Scrape, domain: str) -> UpstreamReport:
    """What a server's metrics say; all 0 where it is none of ``SERVERS``."""
    for names in SERVERS.values():
        if names.fields["running"] in scrape.values:
            counts = {name: int(scrape.sum(metric)) for name, metric in names.fields.items()}
            positions = scrape.by(names.position, "position") if names.position else {}
            ordered = sorted((int(place), int(count)) for (place,), count in positions.items() if place.isdecimal())
            versions = scrape.by(_VERSION, "domain", of=max)
            return UpstreamReport(
                time=scrape.at,
                domain=domain,
                version=int(versions.get((domain,), 0)),
                accepted_per_position=tuple(count for _, count in ordered),
                rejected_versions=int(scrape.sum(_REJECTED, domain=domain)),
                **counts,
            )
    return UpstreamReport(scrape.at, domain)


@dataclass
class Telling:
    """Two threads, until ``close``, so that a server that hangs keeps nobody from hearing of running requests."""

    settings: Settings
    redis_url: str
    url: str
    metrics: TapMetrics
    captured: Callable[[], Mapping[str, int]]
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._name = f"tap {self.settings.tap.host}:{self.settings.tap.port}"
        self._latest = UpstreamReport(time.time(), self.settings.domain)
        self._threads = [
            threading.Thread(target=target, name=f"tap-{name}", daemon=True)
            for name, target in (("load", self._tell_load), ("upstream", self._tell_upstream))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tell no more."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * _PATIENCE)

    def _tell_load(self) -> None:
        """Tell trainers how many requests run: they take their time from them."""
        with ReplicaLoads(self.redis_url) as loads:
            while not self._over.wait(_LOAD_SECONDS):
                load = ReplicaLoad(self.metrics.in_flight, 0, self._latest.version, 0.0)
                _unless_gone(lambda load=load: loads.report(self._name, load))

    def _tell_upstream(self) -> None:
        with ReplicaLoads(self.redis_url) as loads, httpx2.Client(timeout=_PATIENCE, trust_env=False) as client:
            while not self._over.wait(_LOOK_SECONDS):
                self._latest = self._look(client)
                _unless_gone(lambda: loads.report_upstream(self._name, self._latest))

    def _look(self, client: httpx2.Client) -> UpstreamReport:
        scrape = _scrape(client, self.url)
        # While it does not answer, what it counted stays: nothing is known of a new start.
        known = self._latest if scrape is None else report_of(scrape, self.settings.domain)
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
    except ValueError:  # another format, as any other server may have there
        return Scrape()


def _unless_gone(tell: Callable[[], object]) -> None:
    try:
        tell()
    except RedisError as error:
        logger.debug("nothing is told while Redis is gone: %s", error)
