"""The trainer takes no more than serving leaves over, on a real Redis."""

from __future__ import annotations

import time

import pytest
import torch

from osd.registry import replica_loads
from osd.registry.replica_loads import DomainWork, ReplicaLoad, ReplicaLoads
from tests.unit.learning.toys import Toy
from trainer.executor import Executor


@pytest.fixture
def loads(redis_url, monkeypatch):
    monkeypatch.setattr(replica_loads, "EXPIRY_MS", 60_000)  # a report stays until the next
    with ReplicaLoads(redis_url) as loads:
        yield loads


def test_training_stands_still_while_requests_wait(make_loop, loads, eventually, monkeypatch):
    looks, read = [], ReplicaLoads.read
    monkeypatch.setattr(ReplicaLoads, "read", lambda self, glance=False: looks.append(1) or read(self, glance))
    loads.report("replica", ReplicaLoad(8, 3, 1, 100.0))
    worker = make_loop(steps_per_candidate=10_000).begin()
    eventually(lambda: worker.status()["state"] == "yielding")
    eventually(lambda: len(looks) > 10)
    assert worker.status()["steps"] == 0
    loads.report("replica", ReplicaLoad(8, 0, 1, 100.0))
    eventually(lambda: worker.status()["steps"] > 5)


class Core(Executor):
    """A core whose work moves the clock of the trainer and takes no time.

    ``pieces`` are the lengths of the pieces of work in seconds; ``before`` is called before each.
    """

    def __init__(self, monkeypatch):
        self.pieces: list[float] = []
        self.before = lambda: None
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.clock())

    def compute(self, seconds):
        """Work for so many seconds of the trainer's clock."""
        self.before()
        self.pieces.append(seconds)

    def clock(self):
        return sum(self.pieces)


class Slow(Toy):
    """A drafter of forty layers that takes 4 ms a token."""

    def __init__(self, core):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.core = core

    def unroll(self, batch, depth, drafted=None):
        found = super().unroll(batch, depth)
        for _ in range(40):
            self.core.compute(0.0001 * batch.token_ids.numel())
            found = [logits * self.scale for logits in found]
        return found


@pytest.fixture
def core(monkeypatch):
    return Core(monkeypatch)


def start_slow(make_loop, core, **trainer):
    """Start a trainer whose drafter is slow, with records to learn from."""
    slow = Slow(core)
    loop = make_loop(steps_per_candidate=10_000, micro_batch_tokens=256, **trainer)
    loop.build, loop.executor = lambda: slow, core
    return loop.begin(drafter=slow)


@pytest.mark.parametrize("load", [ReplicaLoad(8, 1, 1, 100.0), ReplicaLoad(8, 0, 1, 100.0, inter_token_ms=51.0)])
def test_training_yields_within_200_ms_of_work_when_serving_needs_the_machine(make_loop, core, loads, eventually, load):
    worker = start_slow(make_loop, core, latency_objective_ms=50.0)
    eventually(lambda: worker.status()["steps"] > 1)
    for _ in range(2):
        told: list[int] = []

        def tell(told=told):
            if not told:
                loads.report("replica", load)
                told.append(len(core.pieces))

        core.before = tell
        eventually(lambda: worker.status()["state"] == "yielding")
        assert sum(core.pieces[told[0] :]) < 0.2
        core.before, seen = lambda: None, len(core.pieces)
        loads.report("replica", ReplicaLoad(0, 0, 1, 100.0, 20.0))
        eventually(lambda seen=seen: len(core.pieces) > seen + 100)


def test_worker_pauses_and_ends_while_a_micro_step_stands_still(make_loop, core, loads, eventually):
    worker = start_slow(make_loop, core)
    eventually(lambda: core.pieces)
    loads.report("replica", ReplicaLoad(8, 1, 1, 100.0))
    eventually(lambda: worker.status()["state"] == "yielding")
    assert worker.pause()


def test_training_and_judging_beside_requests_take_at_most_their_duty(make_loop, core, loads, eventually):
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
    # The rest of the last piece is still to come.
    assert core.clock() < 0.2 * (time.monotonic() - began[0]) + max(core.pieces)


def test_beside_requests_it_trains_while_the_fund_covers_it_and_says_why(make_loop, loads, eventually):
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
    told = [event["begins"] for event in loop.events.recent() if event["kind"] == "fund"]
    assert {True, False} == set(told)


def test_training_that_the_fund_does_not_cover_only_glances_at_the_loads(make_loop, loads, eventually, monkeypatch):
    glances, read = [], ReplicaLoads.read
    monkeypatch.setattr(ReplicaLoads, "read", lambda self, glance=False: glances.append(glance) or read(self, glance))
    loop = make_loop(steps_per_candidate=3)

    def watched():
        return loads.report("replica", ReplicaLoad(8, 0, 1, 100.0), {"general": DomainWork(1.0)})

    watched()
    worker = loop.begin()
    eventually(lambda: [watched(), "the fund of training holds" in worker.status()["detail"]][1])
    seen = len(glances)
    eventually(lambda: [watched(), len(glances) > seen + 1][1])
    assert all(glances[seen + 1 :]), "the first look may have been under way"
