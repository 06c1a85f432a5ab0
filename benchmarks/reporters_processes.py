"""The processes of ``benchmarks.reporters``: what many replicas tell and ask Redis, at the rates of the service."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path

from osd.demand import Demand, Workload
from osd.registry.news import LOOK_SECONDS
from osd.registry.pointer import Pointer
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from serving.replica.reporter import REPORT_SECONDS, Control

REPLICAS_OF_A_MACHINE = 8
_WORKLOADS = {"general": Workload(0.5, Demand(((0, 1, 2.0),), 90.0, 0.001), ((1.0, 1.1),))}

Step = Callable[[], float]
"""Does something, and says in how many seconds it is due again."""


def replicas(first: int, count: int, seconds: float, redis_url: str, root: str, told: Queue[list[float]]) -> None:
    """Be ``count`` replicas for so many ``seconds``; tells the seconds that each report of a load took."""
    took: list[float] = []
    due: list[tuple[float, int, Step]] = []
    for number in range(first, first + count):
        for step in _steps(number, redis_url, root, took):
            due.append((time.monotonic() + random.uniform(0, REPORT_SECONDS), len(due), step))  # noqa: S311
    heapq.heapify(due)
    end = time.monotonic() + seconds
    while due[0][0] < end:
        at, order, step = heapq.heappop(due)
        time.sleep(max(at - time.monotonic(), 0.0))
        heapq.heappush(due, (at + step(), order, step))
    told.put(took)


def _steps(number: int, redis_url: str, root: str, took: list[float]) -> list[Step]:
    """What one replica's threads do, each over a connection of its own."""
    machine = f"machine-{number // REPLICAS_OF_A_MACHINE}"
    loads, control = ReplicaLoads(redis_url, machine), Control(redis_url)
    pointer, name = Pointer(redis_url, Path(root)), f"replica-{number}"

    def report() -> float:
        began = time.monotonic()
        load = ReplicaLoad(4, 0, 3, random.uniform(50, 100), 30.0, began, began)  # noqa: S311
        loads.report(name, load, _WORKLOADS)
        took.append(time.monotonic() - began)
        control.get()
        return REPORT_SECONDS

    def look() -> float:
        """Of two threads, each some seconds after it was told to look the last time."""
        pointer.get("general")
        pointer.all()
        return 0.75 * LOOK_SECONDS

    return [report, look]
