"""What a running service and its processes do, second by second."""

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
class Sample:
    """One look, ``seconds`` after the first.

    ``counters`` are those of ``/metrics`` by name, over all labels; ``versions`` is the oldest drafter version in
    service of each domain; ``cpu_seconds`` were spent by the processes that the measuring one has started.
    """

    seconds: float
    counters: dict[str, float]
    versions: dict[str, int]
    cpu_seconds: float

    def count(self, name: str) -> float:
        """A counter, 0 before it was told."""
        return self.counters.get(name, 0.0)


class CpuClock:
    """CPU seconds of all processes below this one, also of those that have ended; this one itself is left out.

    Of a process that ends it knows what the last look saw: nobody adds up the children of Ray's raylet.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], float] = {}

    def read(self) -> float:
        """Look at every process."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess), process.oneshot():
                times = process.cpu_times()
                self._seen[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seen.values())


@dataclass
class ServiceSampler:
    """Looks at a service from entering to leaving, in a thread; leaving waits until the last counters were told.

    A look in between that the service does not answer in time is left out; the first and the last must succeed.

    Raises:
        httpx2.HTTPError: on entering and leaving: the service does not answer.
    """

    url: str
    key: str | None = None
    samples: list[Sample] = field(default_factory=list)
    look_seconds: float = 1.0  # between two looks; a replica tells its counters as often
    settle_seconds: float = 2.5  # until the last counters have been told

    def __enter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self._client = httpx2.Client(base_url=self.url, headers=headers, timeout=30)
        self._clock, self._begun, self._stop = CpuClock(), time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="service-sampler", daemon=True)
        try:
            self._look()
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
                self._look()

    def _run(self) -> None:
        while not self._stop.wait(self.look_seconds):
            with suppress(httpx2.HTTPError):
                self._look()

    def _look(self) -> None:
        text = self._client.get("/metrics").raise_for_status().text
        counters, versions = read(text)
        self.samples.append(Sample(time.monotonic() - self._begun, counters, versions, self._clock.read()))


def read(text: str) -> tuple[dict[str, float], dict[str, int]]:
    """The counters of an exposition, and the oldest drafter version in service of each domain."""
    scrape = Scrape.of(text)
    names = [name for name in scrape.values if name.endswith("_total")]
    counters = {name.removesuffix("_total"): scrape.sum(name) for name in names}
    oldest = scrape.by("osd_drafter_version", "domain", of=min)
    return counters, {domain: int(version) for (domain,), version in oldest.items()}
