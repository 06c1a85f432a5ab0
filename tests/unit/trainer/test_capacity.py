from __future__ import annotations

import os
import threading
import time

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from osd.config import TrainerSettings
from osd.registry.replica_loads import ReplicaLoad
from trainer import capacity as capacity_module
from trainer.capacity import Capacity, lower_priority


class ScriptedLoads:
    """Says what the test wants."""

    def __init__(self, *waiting, running=1, latency=0.0):
        self.waiting = list(waiting)
        self.running, self.latency = running, latency
        self.gone = False
        self.reads = 0

    def read(self, glance=False):
        self.reads += 1
        if self.gone:
            raise RedisConnectionError("gone")
        loads = [ReplicaLoad(self.running, waiting, 1, 10.0, self.latency) for waiting in self.waiting]
        return {f"r{n}": load for n, load in enumerate(loads)}


class Machine:
    """Gives the seconds that were computed on it."""

    def __init__(self):
        self.computed = 0.0

    def clock(self):
        return self.computed


def capacity(loads=None, machine=None, **changes):
    return Capacity(loads or ScriptedLoads(), TrainerSettings(**changes), (machine or Machine()).clock)


def work(it, machine):
    """A tenth of a second on a core that nobody else uses."""
    with it.working():
        machine.computed += 0.1
        time.sleep(0.1)


def test_training_waits_while_any_replica_has_a_request_waiting():
    loads = ScriptedLoads(0, 1, 0)
    it = capacity(loads)
    said: list[str] = []
    threading.Timer(0.2, lambda: loads.waiting.__setitem__(1, 0)).start()
    began = time.monotonic()
    assert it.wait(threading.Event(), threading.Event(), said.append)
    assert 0.15 < time.monotonic() - began < 0.4
    assert set(said) == {"yielding"}


def test_running_requests_do_not_hold_training_up():
    began = time.monotonic()
    assert capacity(ScriptedLoads(0, 0)).wait(threading.Event(), threading.Event(), print)
    assert time.monotonic() - began < 0.05


@pytest.mark.parametrize(
    ("objective", "latency", "spare"),
    [(None, 1e6, 0.5), (50.0, 49.0, 0.5), (50.0, 51.0, 0.0), (50.0, 0.0, 0.5)],
)
def test_tokens_that_come_slower_than_the_objective_hold_training_up(objective, latency, spare):
    assert capacity(ScriptedLoads(0, 0, latency=latency), latency_objective_ms=objective, duty=0.5).spare() == spare


def test_a_stop_ends_the_wait():
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    assert not capacity(ScriptedLoads(5)).wait(stop, threading.Event(), lambda why: None)


def test_while_nothing_was_ever_known_of_the_load_nothing_is_trained_and_it_is_not_asked_at_every_step():
    loads = ScriptedLoads(0)
    loads.gone = True
    it = capacity(loads)
    assert [it.spare() for _ in range(50)] == [0.0] * 50
    assert loads.reads == 1
    assert not it.reachable


def test_what_is_known_of_the_load_stands_for_a_while_and_then_nothing_is_trained(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(capacity_module.time, "monotonic", lambda: now)
    loads = ScriptedLoads(0, running=1)
    it = capacity(loads, duty=0.5)
    assert it.spare() == 0.5
    loads.gone = True
    shares = []
    for _ in range(12):
        now += 1.0
        shares.append(it.spare())
    assert shares == [0.5] * 4 + [0.0] * 8
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "training waits" in caplog.text
    loads.gone, loads.running = False, 0
    now += 1.0
    assert it.spare() == 1.0


def test_a_micro_step_that_hardly_gets_a_core_is_not_rested_from():
    machine = Machine()
    it = capacity(ScriptedLoads(0, 0), machine, duty=0.5)
    with it.working():
        machine.computed += 0.1
        time.sleep(0.3)
    assert it.worked == pytest.approx(0.1)
    began = time.monotonic()
    assert it.wait(threading.Event(), threading.Event(), print)
    assert time.monotonic() - began < 0.05


@pytest.mark.parametrize(
    ("duty", "running", "rest"), [(1.0, 3, 0.0), (0.25, 3, 0.3), (0.25, 0, 0.0)], ids=["always", "beside", "alone"]
)
def test_beside_running_requests_training_rests_as_duty_says(duty, running, rest):
    machine = Machine()
    it = capacity(ScriptedLoads(0, 0, running=running), machine, duty=duty)
    work(it, machine)
    began = time.monotonic()
    assert it.wait(threading.Event(), threading.Event(), lambda why: None)
    assert time.monotonic() - began == pytest.approx(rest, abs=0.05)


def test_a_rest_ends_with_the_last_request():
    loads = ScriptedLoads(0, running=1)
    machine = Machine()
    it = capacity(loads, machine, duty=0.01)
    work(it, machine)
    threading.Timer(0.2, lambda: setattr(loads, "running", 0)).start()
    began = time.monotonic()
    assert it.wait(threading.Event(), threading.Event(), lambda why: None)
    assert 0.15 < time.monotonic() - began < 0.4


def never():
    return False


def test_within_a_micro_step_training_stands_still_while_a_request_waits():
    loads = ScriptedLoads(1, running=0)
    it = capacity(loads)
    shares: list[float] = []
    threading.Timer(0.2, lambda: loads.waiting.__setitem__(0, 0)).start()
    with it.working():
        began = time.monotonic()
        it.give_way(never, shares.append)
        assert 0.15 < time.monotonic() - began < 0.4
    assert set(shares) == {0.0}


def test_within_a_micro_step_training_rests_as_duty_says():
    machine = Machine()
    it = capacity(ScriptedLoads(0), machine, duty=0.25)
    shares: list[float] = []
    with it.working():
        began = time.monotonic()
        machine.computed += 0.1
        it.give_way(never, shares.append)
        assert time.monotonic() - began == pytest.approx(0.4, abs=0.05)
    assert set(shares) == {0.25}


def test_within_a_micro_step_the_loads_are_looked_at_now_and_then():
    loads = ScriptedLoads(0, running=0)
    it = capacity(loads)
    with it.working():
        began = time.monotonic()
        while time.monotonic() < began + 0.3:
            it.give_way(never, print)
    assert 3 < loads.reads < 10


def test_a_micro_step_that_is_to_end_stands_still_no_longer():
    leaving = threading.Event()
    threading.Timer(0.1, leaving.set).start()
    it = capacity(ScriptedLoads(5))
    with it.working():
        began = time.monotonic()
        it.give_way(leaving.is_set, lambda share: None)
        assert 0.05 < time.monotonic() - began < 0.3


def test_only_the_training_thread_gets_the_lowest_priority():
    seen: list[int] = []

    def train():
        lower_priority(1)
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_moments_without_requests_are_known_by_their_share_of_the_last_minute(monkeypatch):
    loads, now = ScriptedLoads(0), 100.0
    monkeypatch.setattr(capacity_module.time, "monotonic", lambda: now)
    it = capacity(loads)
    assert it.idle == 0, "none was seen yet"

    def passes(seconds, running):
        nonlocal now
        loads.running = running
        for _ in range(100):
            now += seconds / 100
            it.spare()
        return it.idle

    assert passes(600.0, 0) == pytest.approx(1.0, abs=0.001)
    assert passes(60.0, 3) == pytest.approx(0.37, abs=0.01)
    for _ in range(30):
        passes(3.0, 0)
        passes(9.0, 1)
    assert it.idle == pytest.approx(0.25, abs=0.03)
