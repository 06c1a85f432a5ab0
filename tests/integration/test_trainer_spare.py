"""Trainer on spare capacity: it yields to serving and follows its fund, with a real Redis."""

from __future__ import annotations

import time

import pytest
import torch

from osd.registry import replica_loads
from osd.registry.pointer import Rollout
from osd.registry.replica_loads import DomainWork, ReplicaLoad, ReplicaLoads
from tests.pointers import put
from tests.unit.learning.toys import Toy
from trainer.executor import Executor


@pytest.fixture
def loads(redis_url, monkeypatch):
    monkeypatch.setattr(replica_loads, "EXPIRY_MS", 60_000)  # a report does not expire during the test
    with ReplicaLoads(redis_url) as loads:
        yield loads


class Core(Executor):
    """Simulated core, whose work advances the clock of the trainer.

    ``pieces`` are the lengths of the pieces of work in seconds; ``before`` is called before each piece.
    """

    def __init__(self, monkeypatch):
        self.pieces: list[float] = []
        self.before = lambda: None
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.clock())

    def compute(self, seconds):
        """Advance the trainer's clock by ``seconds``."""
        self.before()
        self.pieces.append(seconds)

    def clock(self):
        return sum(self.pieces)


class Slow(Toy):
    """Drafter with forty layers that takes 4 ms per token."""

    def __init__(self, core):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.core = core

    def unroll(self, batch, depth, drafted=None):
        output = super().unroll(batch, depth)
        for _ in range(40):
            self.core.compute(0.0001 * batch.token_ids.numel())
            output = [logits * self.scale for logits in output]
        return output


@pytest.fixture
def core(monkeypatch):
    return Core(monkeypatch)


def start_slow(make_loop, core, **trainer):
    """Start a trainer with a slow drafter, and with records."""
    slow = Slow(core)
    loop = make_loop(steps_per_candidate=10_000, micro_batch_tokens=256, **trainer)
    loop.build, loop.executor = lambda: slow, core
    return loop.begin(drafter=slow)


@pytest.mark.parametrize("load", [ReplicaLoad(8, 1, 1, 100.0), ReplicaLoad(8, 0, 1, 100.0, inter_token_ms=51.0)])
def test_training_yields_to_serving_within_200_ms(make_loop, core, loads, eventually, load):
    worker = start_slow(make_loop, core, latency_objective_ms=50.0)
    eventually(lambda: worker.status()["steps"] > 1)
    for _ in range(2):
        reported: list[int] = []

        def report(reported=reported):
            if not reported:
                loads.report("replica", load)
                reported.append(len(core.pieces))

        core.before = report
        eventually(lambda: worker.status()["state"] == "yielding")
        assert sum(core.pieces[reported[0] :]) < 0.2
        core.before, seen = lambda: None, len(core.pieces)
        loads.report("replica", ReplicaLoad(0, 0, 1, 100.0, 20.0))
        eventually(lambda seen=seen: len(core.pieces) > seen + 100)


def test_canary_is_decided_on_while_training_yields(make_loop, core, loads, eventually):
    slow = Slow(core)
    loop = make_loop(steps_per_candidate=10_000, micro_batch_tokens=256, canary_share=0.5, canary_seconds=3600.0)
    loop.build, loop.executor = lambda: slow, core
    loop.first_version(slow)
    canary = loop.registry.publish("general", slow.weights(), slow.config(), {})
    put(loop.pointer, "general", Rollout(1, canary, 0.5, time.time()))
    loop.send(40)
    worker = loop.start()
    eventually(lambda: worker.status()["steps"] > 1)
    loads.report("replica", ReplicaLoad(8, 1, 1, 100.0))
    eventually(lambda: worker.status()["state"] == "yielding")
    assert loop.pointer.get("general").canary == canary
    core.pieces.append(3700.0)  # an hour passes
    eventually(lambda: loop.pointer.get("general").canary is None)
    assert loop.pointer.get("general").stable == 1
    assert "rolled_back" in {event["kind"] for event in loop.events.recent()}


def test_worker_pauses_within_a_stopped_micro_step(make_loop, core, loads, eventually):
    worker = start_slow(make_loop, core)
    eventually(lambda: core.pieces)
    loads.report("replica", ReplicaLoad(8, 1, 1, 100.0))
    eventually(lambda: worker.status()["state"] == "yielding")
    assert worker.pause()


def test_training_during_requests_stays_within_its_duty(make_loop, core, loads, eventually):
    class Timed(Toy):
        def unroll(self, batch, depth, drafted=None):
            core.compute(0.0005 * batch.token_ids.numel())
            return super().unroll(batch, depth)

    loop = make_loop(steps_per_candidate=3, learning_rate=1e-6, duty=0.2)
    loop.build, loop.executor = Timed, core
    loads.report("replica", ReplicaLoad(8, 0, 1, 100.0))
    began: list[float] = []
    core.before = lambda: began.append(time.monotonic())
    worker = loop.begin(60, Timed())
    eventually(lambda: worker.status()["gate"])
    eventually(lambda: worker.status()["steps"] > 6)
    assert worker.pause()
    # The last piece of work may not be finished.
    assert core.clock() < 0.2 * (time.monotonic() - began[0]) + max(core.pieces)


def test_training_during_requests_needs_the_fund(make_loop, loads, eventually):
    loop = make_loop(steps_per_candidate=3)

    def serve(running, busy):
        loads.report("replica", ReplicaLoad(running, 0, 1, 100.0), {"general": DomainWork(busy)})
        return True

    serve(8, 1.0)
    worker = loop.begin()
    eventually(lambda: serve(8, 1.0) and "the fund of training holds" in worker.status()["detail"])
    before = worker.status()["steps"]
    eventually(lambda: serve(0, 1.0) and worker.status()["steps"] > before + 3)
    eventually(lambda: serve(8, 1.0) and "the fund of training holds" in worker.status()["detail"])
    before = worker.status()["steps"]
    eventually(lambda: serve(8, 1e9) and worker.status()["steps"] > before + 3)
    decisions = [event["begins"] for event in loop.events.recent() if event["kind"] == "fund"]
    assert set(decisions) == {True, False}


def test_waiting_training_does_not_raise_the_report_rate(make_loop, loads, eventually, monkeypatch):
    glances, read = [], ReplicaLoads.read
    monkeypatch.setattr(ReplicaLoads, "read", lambda self, glance=False: glances.append(glance) or read(self, glance))
    loop = make_loop(steps_per_candidate=3)

    def is_read():
        return loads.report("replica", ReplicaLoad(8, 0, 1, 100.0), {"general": DomainWork(1.0)})

    is_read()
    worker = loop.begin()
    eventually(lambda: [is_read(), "the fund of training holds" in worker.status()["detail"]][1])
    seen = len(glances)
    eventually(lambda: [is_read(), len(glances) > seen + 1][1])
    assert all(glances[seen + 1 :]), "the first read may have started earlier"
