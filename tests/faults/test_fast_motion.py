"""A thousand versions in minutes, through a service: its resources do not grow."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import msgspec
import numpy as np
import psutil
import pytest
import redis
import torch

from osd.capture.trace import Array, Trace
from osd.capture.writer import TraceWriter
from osd.drafting.recall.snapshot import SNAPSHOT
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.retention import retire
from tests.e2e.conftest import Service, running
from tests.pointers import put
from tests.tiny import VOCABULARY
from tests.traces import small_trace
from tests.waiting import wait_until

VERSIONS, RECORDS = 1000, 100  # records of each version
KEPT_VERSIONS = 20
EVENTS = 3  # per version, in each of the two lists
FULL = 350
"""Versions until all limits are reached; the histories of removed versions and of events fill up last."""

POSITIONS, TOKENS = 4, 128
GROWTH, SLOWDOWN = 1.05, 1.25


def records() -> list[Trace]:
    """Return traces without hidden states, each with its own text."""
    random, traces = np.random.default_rng(0), []
    for _ in range(200):
        ids = random.integers(0, VOCABULARY, (POSITIONS, 8), np.int32)
        logp = np.log(random.dirichlet(np.ones(9), POSITIONS)).astype(np.float16)
        traces.append(
            small_trace(
                prompt_ids=Array.of(random.integers(0, VOCABULARY, 8, np.int32)),
                completion_ids=Array.of(random.integers(0, VOCABULARY, POSITIONS, np.int32)),
                target_ids=Array.of(ids),
                target_logp=Array.of(logp[:, :8]),
                target_tail=Array.of(logp[:, 8]),
                draft_ids=Array.of(ids[:, :0]),
                draft_logp=Array.of(logp[:, :0]),
                draft_tail=Array.of(logp[:, 8]),
                drafted=Array.of(np.full(POSITIONS, -1, np.int32)),
                verdict=Array.of(np.zeros(POSITIONS, np.int8)),
                source=Array.of(np.full(POSITIONS, -1, np.int8)),
                hidden=None,
            )
        )
    return traces


def yardstick() -> float:
    """Return the CPU seconds of constant work, as the speed of a shared machine varies."""
    state, weights, began = torch.ones(4, 64), torch.eye(64), time.process_time()
    for _ in range(1000):
        state = torch.tanh(state @ weights)
    return time.process_time() - began


class TimeLapse:
    """Trainer and traffic of a service, which publish a version with each request."""

    def __init__(self, service: Service, ends: ExitStack) -> None:
        self._service, url = service, service.redis.url
        self._newest = service.registry.load("general", 1)
        self._pointer = ends.enter_context(Pointer(url, service.registry.root))
        self._events = ends.enter_context(Events(url))
        self._redis = ends.enter_context(redis.Redis.from_url(url))
        self._capture = service.settings.capture.model_copy(update={"max_queue": 2 * RECORDS})
        self._writer = TraceWriter(url, self._capture)
        ends.callback(self._writer.close)
        self._records, self._sent = records(), 0
        (self._replica,) = [
            process
            for process in psutil.Process().children(recursive=True)
            if "ray::ServeReplica" in " ".join(process.cmdline())
        ]

    def publish(self) -> int:
        """Publish a version, put it in service, and remove old versions; return its number."""
        registry, weights = self._service.registry, self._newest.weights
        manifest = {"parent": registry.numbers("general")[-1], "gate": {"acceptance": 0.5}}
        number = registry.publish("general", weights, self._newest.config, manifest)
        put(self._pointer, "general", Rollout(number, None, 0.0, time.time()))
        retire(registry, "general", KEPT_VERSIONS, nullcontext())
        for _ in range(EVENTS):
            self._events.add("published", "general", number, reason="better")
            self._events.add("train_step", "general", loss=1.0, step=number)
        return number

    def capture(self, version: int) -> None:
        """Write the records of a version."""
        for _ in range(RECORDS):
            self._sent += 1
            trace, name = self._records[self._sent % len(self._records)], f"cmpl-{self._sent}-0"
            trace = msgspec.structs.replace(trace, request_id=name, created=time.time(), drafter_version=version)
            assert self._writer.offer(trace)
        wait_until(lambda: sum(self._writer.counters().values()) == self._sent, every=0.005)

    def serve(self, version: int) -> None:
        """Wait until the replica has the version, and send a request."""
        wait_until(lambda: self._has_swapped(version), every=0.01)
        answer = self._service.complete(f"version {version}", max_tokens=TOKENS, ignore_eos=True)
        assert answer.status_code == 200

    def _has_swapped(self, version: int) -> bool:
        events = self._events.recent(4 * EVENTS, steps=False)
        return ("swapped", version) in [(event["kind"], event["version"]) for event in events]

    def dropped(self) -> int:
        """Return the number of dropped records."""
        return self._writer.counters()["dropped"]

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the replica, more exactly than psutil does."""
        return time.clock_gettime((~self._replica.pid << 3) | 2)  # as clock_getcpuclockid computes the clock

    def sizes(self) -> dict[str, float]:
        """Return the sizes of all resources in bytes."""
        home = self._service.settings.home_dir
        return {
            "disk": sum(path.stat().st_size for path in home.rglob("*") if path.is_file()),
            "memory": self._replica.memory_info().rss,
            "Redis": sum(self._redis.memory_usage(key, samples=0) for key in self._redis.scan_iter()),
            "/metrics": len(self._service.http.get("/metrics").raise_for_status().content),
        }


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    """Service with one replica, whose table of recall is full soon."""
    with running(tmp_path_factory.mktemp("service"), {"replicas": 1}, recall={"megabytes": 1}) as service:
        yield service


@pytest.mark.soak
@pytest.mark.fault(
    "a thousand versions and 100,000 records pass through one service",
    "disk, memory, Redis and /metrics grow by at most 5 % after they are full, and the CPU time of a request by at "
    "most 25 %",
    process="replica: 1,000 swaps",
)
def test_resources_stop_growing_at_their_limits(service, fault_result):
    tenth, began = (VERSIONS - FULL) // 10, time.monotonic()
    measured, series = {*range(FULL, FULL + tenth), *range(VERSIONS - tenth, VERSIONS)}, defaultdict(list)
    requests, yardsticks = [], []
    with ExitStack() as ends:
        lapse = TimeLapse(service, ends)
        for version in range(VERSIONS):
            if version == FULL:  # recall writes its first snapshot after a minute
                wait_until((service.registry.root / "general" / SNAPSHOT).exists)
            number, before = lapse.publish(), lapse.cpu_seconds()
            lapse.serve(number)
            if version in measured:
                requests.append(lapse.cpu_seconds() - before)
                yardsticks.append(yardstick())
                for name, size in lapse.sizes().items():
                    series[name].append(size)
            lapse.capture(number)
        dropped = lapse.dropped()
    seconds = time.monotonic() - began
    growth = {
        name: statistics.median(sizes[tenth:]) / statistics.median(sizes[:tenth]) for name, sizes in series.items()
    }
    # Other load only slows a request down.
    slower = min(requests[tenth:]) / min(yardsticks[tenth:]) / (min(requests[:tenth]) / min(yardsticks[:tenth]))
    print(f"{VERSIONS} versions in {seconds:.0f} s; a request takes {slower - 1:+.1%} of CPU time")
    changes = ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in growth.items())
    fault_result.lost = f"{dropped} records in {seconds:.0f} s; {changes}, CPU time {slower - 1:+.1%}"
    assert dropped == 0
    assert all(ratio < GROWTH for ratio in growth.values()), growth
    assert slower < SLOWDOWN
