"""A thousand versions and a million records in minutes: the resources of a service do not grow."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import ExitStack, nullcontext

import msgspec
import numpy as np
import psutil
import pytest
import redis
import torch

from osd.capture.reader import TraceReader
from osd.capture.server import RedisServer
from osd.capture.trace import Array
from osd.capture.writer import TraceWriter
from osd.config import CaptureSettings, RecallSettings
from osd.drafting.recall.memories import Memories
from osd.drafting.recall.rehearsal import rehearse
from osd.learning.replay import Replay
from osd.registry.events import Events
from osd.registry.pointer import Pointer, Rollout
from osd.registry.replica_loads import ReplicaLoads
from osd.registry.retention import retire
from osd.registry.trained_requests import REQUESTS, TrainedRequests
from osd.registry.versions import Registry
from serving.metrics import exposition
from serving.metrics.replicas import ReplicaMetrics
from serving.replica.reporter import Control, Reporter
from serving.replica.rollout_follower import Uptake
from tests.pointers import put
from tests.tiny import VOCABULARY
from tests.traces import small_trace
from tests.unit.engine.harness import make_drafter, prompts, running

VERSIONS, RECORDS, OVER_REDIS = 1000, 1000, 100  # records of each version, and those of them that go over Redis
KEPT_VERSIONS = 20
EVENTS = 3  # per version, in each of the two lists
FULL = 350
"""Versions until all limits are reached; the histories of removed versions and of events fill up last."""

CAPTURE = CaptureSettings(max_records=5000, max_queue=OVER_REDIS, keep_mb=2)
POSITIONS = 4
GROWTH = 1.05


def records():
    """Yield traces without hidden states, each with its own text."""
    random = np.random.default_rng(0)
    for _ in range(200):
        ids = random.integers(0, VOCABULARY, (POSITIONS, 8), np.int32)
        logp = np.log(random.dirichlet(np.ones(9), POSITIONS)).astype(np.float16)
        yield small_trace(
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


def yardstick():
    """Return the CPU seconds of constant work, as the speed of a shared machine varies."""
    state, weights, began = torch.ones(4, 64), torch.eye(64), time.process_time()
    for _ in range(1000):
        state = torch.tanh(state @ weights)
    return time.process_time() - began


class MiniService:
    """Parts of a replica and a trainer that store data, in one process."""

    def __init__(self, directory, home, url, ends):
        drafter = make_drafter("language_model", directory)
        self.weights, self.config = drafter.weights(), drafter.config()
        self.client = ends.enter_context(running(directory, drafter=drafter))
        self.registry = Registry(home)
        self.pointer = ends.enter_context(Pointer(url, home))
        self.events = ends.enter_context(Events(url))
        self.redis = ends.enter_context(redis.Redis.from_url(url))
        self.writer, self.reader = (
            TraceWriter(url, CAPTURE),
            TraceReader(url, CAPTURE, "general", "trainer-general", "t"),
        )
        ends.callback(self.writer.close)
        ends.callback(self.reader.close)
        self.replay, self.trained_requests = Replay(50_000, 0.1, anchors=0.1, max_bytes=20 << 20), TrainedRequests()
        memories = Memories(RecallSettings(megabytes=4))
        self.table, self.text = memories.of(""), memories.backend.text(64)
        self.metrics = ReplicaMetrics()
        loads, control = ends.enter_context(ReplicaLoads(url)), ends.enter_context(Control(url))
        self.reporter = Reporter("a", self.client.engine, self.writer, [], Uptake(), loads, control, self.metrics.push)
        self.records, self.number, self.received = list(records()), 0, 0

    def capture(self, version):
        """Bring a version's records to the trainer: some over the stream, and some of these into the n-gram cache."""
        goal = self.received + OVER_REDIS
        traces = [self.record(version) for _ in range(RECORDS)]
        for trace in traces[:OVER_REDIS]:
            assert self.writer.offer(trace)
        while self.received < goal:
            batch = self.reader.read(OVER_REDIS, 10_000)
            assert batch, "the stream is empty"
            self.received += len(batch)
            self.reader.ack([delivery.place for delivery in batch])
            for number, delivery in enumerate(batch):
                self.replay.add(delivery.record)
                if number % 5 == 0:
                    self.trained_requests.add([delivery.record.request_id])
                    for _ in rehearse(self.table, self.text, delivery.record):
                        pass
        for trace in traces[OVER_REDIS:]:
            self.replay.add(trace)
        self.replay.sample(1000)

    def record(self, version):
        """Return the next record."""
        self.number += 1
        trace, name = self.records[self.number % len(self.records)], f"cmpl-{self.number}-0"
        return msgspec.structs.replace(trace, request_id=name, created=time.time(), drafter_version=version)

    def publish(self):
        """Publish a version, put it in service, and remove old versions; return its number."""
        manifest = {
            "parent": (self.registry.numbers("general") or [None])[-1],
            REQUESTS: self.trained_requests.state(),
            "gate": {"acceptance": 0.5},
        }
        number = self.registry.publish("general", self.weights, self.config, manifest)
        put(self.pointer, "general", Rollout(number, None, 0.0, time.time()))
        self.trained_requests.clear()
        retire(self.registry, "general", KEPT_VERSIONS, nullcontext())
        for _ in range(EVENTS):
            self.events.add("published", "general", number, reason="better")
            self.events.add("train_step", "general", loss=1.0, step=number)
        return number

    def serve(self, number):
        """Swap a version in and decode a little; return the CPU time of a decoding step, relative to the yardstick."""
        engine = self.client.engine
        engine.stage(number, self.registry.load("general", number).weights)
        forwards, began = engine.counters().forwards, time.process_time()
        for place, prompt in enumerate(prompts([16] * 2)):
            self.client.submit(f"{number}-{place}", prompt, 16, ignore_eos=True)
        self.client.wait()
        seconds = time.process_time() - began
        self.client.results.clear()
        assert engine.drafter_version == number
        self.metrics.push(self.reporter.report())
        return seconds / (engine.counters().forwards - forwards) / yardstick()

    def sizes(self, home):
        """Return the sizes of all resources in bytes."""
        totals = self.metrics.totals(time.time())
        return {
            "disk": sum(path.stat().st_size for path in home.rglob("*") if path.is_file()),
            "memory": psutil.Process().memory_info().rss,
            "Redis": self.redis.info("memory")["used_memory_dataset"],
            "/metrics": len(exposition.render(totals, "general", "tiny")),
        }


@pytest.mark.soak
@pytest.mark.fault(
    "a thousand versions and a million records pass through one service",
    "disk, memory, Redis, the time of a step and /metrics grow by at most 5 % after they are full",
)
def test_resources_stop_growing_at_their_limits(tiny_target, tmp_path, fault_result):
    series = defaultdict(list)
    with ExitStack() as ends:
        server = ends.enter_context(RedisServer(256))
        service = MiniService(tiny_target, tmp_path, server.url, ends)
        for _ in range(VERSIONS):
            number = service.publish()
            service.capture(number)
            series["step"].append(service.serve(number))
            for name, size in service.sizes(tmp_path).items():
                series[name].append(size)
        dropped = service.writer.counters()["dropped"]
    tenth = (VERSIONS - FULL) // 10
    growth = {}
    for name, sizes in series.items():
        first, last = sizes[FULL : FULL + tenth], sizes[-tenth:]
        growth[name] = statistics.median(last) / statistics.median(first)
    fault_result.lost = f"{dropped} records; " + ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in growth.items())
    assert dropped == 0
    assert all(ratio < GROWTH for ratio in growth.values()), growth
