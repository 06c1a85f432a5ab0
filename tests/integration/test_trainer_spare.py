"""The trainer takes no more than serving leaves over, on a real Redis."""

from __future__ import annotations

import time

import pytest
import torch

from osd.registry import replica_loads
from osd.registry.replica_loads import ReplicaLoad, ReplicaLoads
from tests.unit.learning.test_value import workload
from tests.unit.learning.toys import Toy
from trainer import investor
from trainer.executor import Local


def test_training_stands_still_while_requests_wait(make_loop, eventually, monkeypatch):
    looks, read = [], ReplicaLoads.read
    monkeypatch.setattr(ReplicaLoads, "read", lambda self, glance=False: looks.append(1) or read(self, glance))
    loop = make_loop(steps_per_candidate=10_000)
    loop.first_version()
    loads = ReplicaLoads(loop.url)
    loads.report("replica", ReplicaLoad(8, 3, 1, 100.0))
    loop.send(40)
    worker = loop.start()
    eventually(lambda: worker.status()["state"] == "yielding")
    eventually(lambda: len(looks) > 10)
    assert worker.status()["steps"] == 0
    loads.report("replica", ReplicaLoad(8, 0, 1, 100.0))
    eventually(lambda: worker.status()["steps"] > 5)
    loads.close()


class Unshared(Local):
    """A core that nobody else uses: what takes time there is work."""

    def __init__(self):
        self.pieces: list[tuple[float, float]] = []

    def compute(self, seconds):
        """Work for so many seconds."""
        began = time.monotonic()
        time.sleep(seconds)
        self.pieces.append((began, time.monotonic() - began))

    def clock(self):
        return sum(took for _, took in self.pieces)


class Slow(Toy):
    """Takes 4 ms a token in forty layers, as a drafter does for which the machine is small."""

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


@pytest.mark.parametrize("load", [ReplicaLoad(8, 1, 1, 100.0), ReplicaLoad(8, 0, 1, 100.0, inter_token_ms=51.0)])
def test_training_yields_within_200_ms_when_serving_needs_the_machine(make_loop, eventually, load):
    core = Unshared()
    slow = Slow(core)
    loop = make_loop(steps_per_candidate=10_000, micro_batch_tokens=256, latency_objective_ms=50.0)
    loop.build, loop.executor = lambda: slow, core
    loop.first_version(slow)
    loads = ReplicaLoads(loop.url)
    loop.send(40)
    worker = loop.start()
    eventually(lambda: worker.status()["steps"] > 1)
    for _ in range(2):
        steps, told = worker.status()["steps"], time.monotonic()
        while time.monotonic() < told + 0.6:
            loads.report("replica", load)
            time.sleep(0.05)
        late = [at - told for at, _ in core.pieces if at > told]
        assert all(after < 0.2 for after in late), late
        assert worker.status()["steps"] <= steps + 1
        assert worker.status()["state"] == "yielding"
        seen = len(core.pieces)
        loads.report("replica", ReplicaLoad(0, 0, 1, 100.0, 20.0))
        eventually(lambda seen=seen: len(core.pieces) > seen + 100)
    loads.close()


def test_a_worker_rests_or_ends_while_a_micro_step_stands_still(make_loop, eventually):
    core = Unshared()
    slow = Slow(core)
    loop = make_loop(steps_per_candidate=10_000, micro_batch_tokens=256)
    loop.build, loop.executor = lambda: slow, core
    loop.first_version(slow)
    loads = ReplicaLoads(loop.url)
    loop.send(40)
    worker = loop.start()
    eventually(lambda: core.pieces)
    loads.report("replica", ReplicaLoad(8, 1, 1, 100.0))
    eventually(lambda: worker.status()["state"] == "yielding")
    assert worker.pause()
    loads.close()
    loop.stop()


@pytest.mark.parametrize(("running", "least", "most"), [(8, 0.1, 0.3), (0, 0.5, 1.0)])
def test_beside_running_requests_training_and_judging_take_their_duty_of_the_time(
    make_loop, eventually, running, least, most
):
    core = Unshared()

    class Timed(Toy):
        def unroll(self, batch, depth, drafted=None):
            core.compute(0.0005 * batch.token_ids.numel())
            return super().unroll(batch, depth)

    loop = make_loop(steps_per_candidate=3, learning_rate=1e-6, duty=0.2)
    loop.build, loop.executor = Timed, core
    loop.first_version(Timed())
    loop.send(60)
    loads = ReplicaLoads(loop.url)
    loads.report("replica", ReplicaLoad(running, 0, 1, 100.0))
    worker = loop.start()
    eventually(lambda: worker.status()["steps"] > 3)
    since, seconds = time.monotonic(), 3.0
    while time.monotonic() < since + seconds:
        loads.report("replica", ReplicaLoad(running, 0, 1, 100.0))
        time.sleep(0.1)
    share = sum(took for began, took in core.pieces if began > since) / seconds
    assert least < share < most, share
    assert worker.status()["gate"]
    loads.close()


def test_beside_requests_it_trains_only_where_their_rounds_are_worth_it_and_says_why(
    make_loop, eventually, monkeypatch
):
    monkeypatch.setattr(investor, "WINDOW_SECONDS", 0.1)  # not minutes until other costs are believed
    dear, cheap = ({"general": workload(0.9, costs, 4)} for costs in ((1.0, 9.0, 9.0), (1.0, 1.01, 1.02)))
    loop = make_loop(steps_per_candidate=10_000)
    loop.first_version()
    loop.send(40)
    loads = ReplicaLoads(loop.url)

    def serve(running, workloads):
        loads.report("replica", ReplicaLoad(running, 0, 1, 100.0), workloads)
        return True

    serve(8, dear)
    worker = loop.start()
    eventually(lambda: serve(8, dear) and "cost more" in worker.status()["detail"])
    assert worker.status()["steps"] == 0
    eventually(lambda: serve(0, dear) and worker.status()["steps"] > 3)
    eventually(lambda: serve(8, dear) and "cost more" in worker.status()["detail"])
    before = worker.status()["steps"]
    assert worker.learner is not None
    worker.learner.value.horizon.passed(80_000)
    eventually(lambda: serve(8, cheap) and worker.status()["steps"] > before + 3)
    told = [event for event in loop.events.recent() if event["kind"] == "investment"]
    assert [event["pays"] for event in told] == [False, True, False, True]
    assert [event["price"] for event in told] == [1.0, 0.0, 1.0, 1.0]
    loads.close()


def test_while_training_does_not_pay_replicas_tell_no_more_often_for_it(make_loop, eventually, monkeypatch):
    monkeypatch.setattr(replica_loads, "ATTENTION_MS", 300)
    loop = make_loop(steps_per_candidate=10_000)
    loop.first_version()
    loop.send(40)
    loads = ReplicaLoads(loop.url)

    def watched():
        return loads.report("replica", ReplicaLoad(8, 0, 1, 100.0), {"general": workload(0.9, (1.0, 9.0, 9.0), 4)})

    watched()
    worker = loop.start()
    eventually(lambda: [watched(), "cost more" in worker.status()["detail"]][1])
    eventually(lambda: not watched())
    since = time.monotonic()
    while time.monotonic() < since + 1.5:
        assert not watched()
        time.sleep(0.05)
    loads.close()
