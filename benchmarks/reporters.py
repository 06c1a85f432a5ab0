"""The control plane under many replicas: what Redis and the metrics actor take, and how soon they answer."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import redis
from rich.table import Table as Grid

from benchmarks.pulls import spent
from benchmarks.report import columns
from benchmarks.reporters_processes import replicas
from osd.capture.server import RedisServer
from osd.metrics import Name
from osd.registry.pointer import Pointer, Rollout
from serving.metrics.replicas import ReplicaMetrics
from serving.metrics.report import Report

_PROCESSES = 4
_VERSIONS = 40  # in a replica's counters
_PUSHERS = 8


@dataclass(frozen=True)
class Found:
    """Parts of a core that Redis and the actor took, and the milliseconds of a load's and of a counter's report."""

    replicas: int
    redis: float
    commands_a_second: float
    actor: float
    pushes_a_second: float
    load_p50_ms: float
    load_p99_ms: float
    push_p50_ms: float
    push_p99_ms: float


def measure(count: int, seconds: float, say: Callable[[str], None] = lambda step: None) -> Found:
    """``count`` replicas report for so many seconds, to a Redis and to an actor of their own; none of them decodes.

    Raises:
        RuntimeError: a process ends before it should.
    """
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(RedisServer(256))
        (Path(root) / "general" / "1").mkdir(parents=True)
        with Pointer(server.url, Path(root)) as pointer:
            pointer.replace("general", None, Rollout(1, None, 0.0, time.time()))
        say(f"{count} replicas and Redis")
        commands, taken, reports = _redis(server.url, root, count, seconds)
        say(f"{count} replicas and the metrics actor")
        busy, pushes = _actor(count, seconds)
        return Found(count, taken, commands, busy, len(pushes) / seconds, *_percentiles(reports), *_percentiles(pushes))


def table(found: list[Found]) -> Grid:
    """A line for each number of replicas."""
    names = (
        "Redis, of a core",
        "commands/s",
        "a load, ms (p99)",
        "actor, of a core",
        "reports/s",
        "a report, ms (p99)",
    )
    grid = columns("replicas", *names)
    for one in found:
        grid.add_row(
            str(one.replicas),
            f"{one.redis:.3f}",
            f"{one.commands_a_second:.0f}",
            f"{one.load_p50_ms:.2f} ({one.load_p99_ms:.2f})",
            f"{one.actor:.3f}",
            f"{one.pushes_a_second:.0f}",
            f"{one.push_p50_ms:.2f} ({one.push_p99_ms:.2f})",
        )
    return grid


def _redis(url: str, root: str, count: int, seconds: float) -> tuple[float, float, list[float]]:
    """Commands a second, the part of a core that Redis took, and the seconds of each report of a load."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    shares = [count // _PROCESSES + (number < count % _PROCESSES) for number in range(_PROCESSES)]
    processes = [
        context.Process(target=replicas, args=(sum(shares[:at]), share, seconds, url, root, told), daemon=True)
        for at, share in enumerate(shares)
        if share
    ]
    with redis.Redis.from_url(url) as client:
        for process in processes:
            process.start()
        info: Any = client.info()
        while info["connected_clients"] < count:  # they start
            if not all(process.is_alive() for process in processes):
                raise RuntimeError("a process that reports has ended")
            time.sleep(0.1)
            info = client.info()
        time.sleep(seconds / 4)
        began, before, commands = time.monotonic(), spent(client), info["total_commands_processed"]
        first: Any = client.info()
        commands = first["total_commands_processed"]
        time.sleep(seconds / 2)
        last: Any = client.info()
        passed = time.monotonic() - began
        taken = (spent(client) - before) / passed
        rate = (last["total_commands_processed"] - commands) / passed
    took = [each for _ in processes for each in told.get(timeout=seconds + 60)]
    for process in processes:
        process.join(10)
    return rate, taken, took


def _actor(count: int, seconds: float) -> tuple[float, list[float]]:
    """The part of a core that the actor took, and the seconds of each report."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, address="local")
    try:
        actor: Any = ray.remote(num_cpus=0)(_Watched).remote()
        pid: int = ray.get(actor.pid.remote())
        took: list[float] = []
        reports = [_report(f"replica-{number}", 1.0) for number in range(count)]
        ray.get([actor.push.remote(report) for report in reports])  # so that it knows how many there are
        lock, at, due = threading.Lock(), [0], time.monotonic()
        pause: float = ray.get(actor.push.remote(_report("replica-0", 2.0)))
        end, before = due + seconds, psutil.Process(pid).cpu_times()

        def push() -> None:
            nonlocal due
            while True:
                with lock:  # as many as are asked for, one after the other
                    number, at[0], mine = at[0] % count, at[0] + 1, due
                    due += pause / count
                if mine > end:
                    return
                time.sleep(max(mine - time.monotonic(), 0.0))
                began = time.monotonic()
                ray.get(actor.push.remote(_report(f"replica-{number}", 3.0 + at[0])))
                took.append(time.monotonic() - began)

        threads = [threading.Thread(target=push) for _ in range(_PUSHERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        now = psutil.Process(pid).cpu_times()
        return (now.user + now.system - before.user - before.system) / seconds, took
    finally:
        ray.shutdown()


class _Watched(ReplicaMetrics):
    """The actor, which says where it runs."""

    def pid(self) -> int:
        """Its process."""
        import os

        return os.getpid()


def _report(name: str, count: float) -> Report:
    """As many counters as a replica has that knows forty versions, all of them changed."""
    plain = ("requests", "prompt_tokens", "completion_tokens", "rounds", "drafted", "accepted", "busy_seconds")
    counters: dict[Name, float] = dict.fromkeys(plain, count)
    kinds = ("rounds", "drafted", "accepted", "tokens", "plain_seconds", "decode_seconds")
    for version in range(_VERSIONS):
        counters |= {(f"version_{kind}", "general", version): count for kind in kinds}
    counters |= {("accepted_per_position", position): count for position in range(16)}
    return Report(name, time.time(), _VERSIONS, True, counters, {"running": 4, "waiting": 0})


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    hundredths = statistics.quantiles(seconds, n=100)
    return 1000 * hundredths[49], 1000 * hundredths[98]
