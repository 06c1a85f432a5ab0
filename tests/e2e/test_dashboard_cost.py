"""What the dashboard costs: the replica that it follows, and whoever waits for its first picture."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn

from osd.config import Settings
from serving.api.routes import create_app
from serving.dashboard.data import compose
from serving.metrics.history import HISTORY_SECONDS, Bins
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report
from tests.e2e.conftest import Service, free_port
from tests.unit.serving.scripted import ScriptedService

SECONDS, VIEWERS = 20.0, 5
SHARE = 0.01
PAINT_MS = 1000


def processes(*names: str) -> list[Path]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_text()
            except OSError:
                continue
            if command.startswith("ray::") and any(name in command for name in names):
                found.append(folder)
    return found


def cpu_seconds(folders: list[Path]) -> float:
    """User and system time of processes and all their threads."""
    ticks = [(folder / "stat").read_text().rpartition(")")[2].split()[11:13] for folder in folders]
    return sum(int(user) + int(system) for user, system in ticks) / 100


@pytest.mark.soak
def test_five_viewers_take_at_most_a_hundredth_of_what_a_busy_replica_has(service: Service) -> None:
    replicas = processes("ServeReplica")
    assert len(replicas) == 2

    def used(seconds: float) -> float:
        begun, at = cpu_seconds(replicas), time.monotonic()
        time.sleep(seconds)
        return (cpu_seconds(replicas) - begun) / (time.monotonic() - at)

    stop = threading.Event()
    events: list[int] = []

    def view() -> None:
        with httpx.Client(base_url=service.url, timeout=30) as http:
            while not stop.is_set():
                with http.stream("GET", "/dashboard/stream?seconds=3600") as answer:
                    for line in answer.iter_lines():
                        events.append(line.startswith("data"))
                        if stop.is_set():
                            break

    for seed in range(4):
        service.complete(max_tokens=60, ignore_eos=True, temperature=2, seed=seed)
    alone = used(SECONDS)
    viewers = [threading.Thread(target=view) for _ in range(VIEWERS)]
    for viewer in viewers:
        viewer.start()
    time.sleep(2)
    watched = used(SECONDS)
    stop.set()
    for viewer in viewers:
        viewer.join()
    share = (watched - alone) / len(replicas)
    print(f"{alone:.4f} CPU seconds a second of both replicas alone, {watched:.4f} with {VIEWERS} viewers,", end=" ")
    print(f"{100 * share:.2f} % of a core for each replica; {sum(events)} events")
    assert sum(events) > 0.8 * VIEWERS * SECONDS
    assert share <= SHARE


class Past(ScriptedService):
    """A service with an hour of history."""

    def __init__(self) -> None:
        super().__init__(Settings())
        self.metrics, now, chance = ReplicaMetrics(), time.time(), random.Random(0)  # noqa: S311  nothing is secret
        counters: dict[Any, float] = {}
        for second in range(HISTORY_SECONDS):
            for name in ("requests", "completion_tokens", "rounds", "drafted", "accepted", "busy_seconds"):
                counters[name] = counters.get(name, 0) + 1 + chance.randrange(40)
            for source in ("recall", "request", "copy", "eagle"):
                for name in ("source_drafted", "source_accepted"):
                    counters[name, source] = counters.get((name, source), 0) + 1 + chance.randrange(9)
            for version in range(1, 7):
                for name in ("rounds", "drafted", "accepted", "tokens", "plain_seconds", "decode_seconds"):
                    key = (f"version_{name}", "general", version)
                    counters[key] = counters.get(key, 0) + chance.randrange(20)
            for name in ("time_to_first_token", "inter_token", "request_time", "queue_time"):
                for place in range(3, 9):
                    key = (f"{name}_bucket", place)
                    counters[key] = counters.get(key, 0) + chance.randrange(5)
            at = now - HISTORY_SECONDS + second
            self.metrics.push(Report("a", at, second // 600, True, dict(counters), {"running": 2, "waiting": 1}))

    async def dashboard_state(self) -> dict[str, Any]:
        feeds = {"redis": True, "rollout": None, "streams": {}, "events": [], "versions": [], "domains": ["general"]}
        return compose(self.settings, self.model, self.metrics.totals(time.time()), feeds)

    async def dashboard_bins(self, seconds: int, since: int | None) -> Bins:
        return self.metrics.bins(time.time(), seconds, since)


@contextmanager
def served(service: ScriptedService) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = server.force_exit = True
    thread.join()


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [900, 3600])
def test_the_first_picture_comes_within_a_second_with_an_hour_of_history(browser, seconds: int) -> None:
    with served(Past()) as url:
        page = browser.new_page()
        page.goto(f"{url}/dashboard")
        page.locator("#chart-acceptance canvas").wait_for()
        if seconds != 900:
            begun = time.monotonic()
            page.locator(f'[data-seconds="{seconds}"]').click()
            page.wait_for_function("document.querySelector('#note-acceptance').textContent.includes('drafted')")
            print(f"another window after {1000 * (time.monotonic() - begun):.0f} ms,", end=" ")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        size = page.evaluate(
            "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.decodedBodySize, 0)"
        )
        data = page.evaluate("performance.mark('now').startTime")
        page.close()
    print(f"first contentful paint {paint:.0f} ms, charts within {data:.0f} ms, {size / 1024:.0f} KiB of files")
    assert paint < PAINT_MS
    assert data < 2 * PAINT_MS
