"""Samples of a running service's metrics and of its processes' CPU time."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Self

import httpx2
import psutil

from osd.scrape import Scrape


@dataclass(frozen=True)
class ServiceSample:
    """State of the service ``seconds`` after the first sample."""

    seconds: float  # time since the first sample
    counters: dict[str, float]  # counters of /metrics by name, summed over all labels
    versions: dict[str, int]  # oldest drafter version in service, by domain
    cpu_seconds: float  # CPU time of all processes that this process has started

    def count(self, name: str) -> float:
        """Return a counter, 0 if the service has not reported it yet."""
        return self.counters.get(name, 0.0)


class CpuClock:
    """CPU seconds of all descendants of this process, or of a process and its descendants.

    Processes that have ended keep the value of the last reading, because Ray's raylet does not add up its children.
    """

    def __init__(self, root: int | None = None) -> None:
        """Count the descendants of this process; with the id ``root``, that process and its descendants."""
        self._root = root
        self._seen: dict[tuple[int, float], float] = {}

    def read(self) -> float:
        """Read the CPU time of every process and return the sum."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._root)
            for process in [*([] if self._root is None else [root]), *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess), process.oneshot():
                    times = process.cpu_times()
                    self._seen[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seen.values())


@dataclass
class ServiceSampler:
    """Context that samples a service in a thread; on exit it waits until the last counters are reported.

    A sample that fails in between is skipped; the first and the last sample must succeed.

    Raises:
        httpx2.HTTPError: on entry and exit, the service does not answer.
    """

    url: str
    key: str | None = None
    samples: list[ServiceSample] = field(default_factory=list)
    interval_seconds: float = 1.0  # a replica reports its counters at the same rate
    settle_seconds: float = 2.5  # until the last counters are reported

    def __enter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self._client = httpx2.Client(base_url=self.url, headers=headers, timeout=30)
        self._clock, self._start, self._stop = CpuClock(), time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="service-sampler", daemon=True)
        try:
            self._take_sample()
        except BaseException:
            self._client.close()
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            time.sleep(self.settle_seconds)
        self._stop.set()
        self._thread.join()
        with closing(self._client):
            if kind is None:
                self._take_sample()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_seconds):
            with suppress(httpx2.HTTPError):
                self._take_sample()

    def _take_sample(self) -> None:
        text = self._client.get("/metrics").raise_for_status().text
        counters, versions = read(text)
        self.samples.append(ServiceSample(time.monotonic() - self._start, counters, versions, self._clock.read()))


def read(text: str) -> tuple[dict[str, float], dict[str, int]]:
    """Return the counters in a metrics text, and the oldest drafter version in service by domain."""
    scrape = Scrape.of(text)
    names = [name for name in scrape.values if name.endswith("_total")]
    counters = {name.removesuffix("_total"): scrape.sum(name) for name in names}
    oldest = scrape.by("osd_drafter_version", "domain", of=min)
    return counters, {domain: int(version) for (domain,), version in oldest.items()}
