from __future__ import annotations

import os
import threading

import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError
from torch import nn

from osd.config import TrainerSettings
from osd.registry.replica_loads import ReplicaLoad
from tests.clocks import Clock
from trainer import capacity as module
from trainer.capacity import SpareCapacity, lower_priority, yielding


class Scene:
    """Replicas and one core on a fake clock; ``computed`` is the CPU time of training on the core."""

    def __init__(self, clock, waiting=0, running=1, latency=0.0, **changes):
        self.clock, self.waiting, self.running, self.latency = clock, waiting, running, latency
        self.is_down, self.reads, self.computed, self.states = False, 0, 0.0, []
        self.pauses = False
        self.capacity = SpareCapacity(self, TrainerSettings(**changes), lambda: self.computed, lambda now: self.pauses)

    def read(self, glance=False):
        self.reads += 1
        if self.is_down:
            raise RedisConnectionError("gone")
        busy = ReplicaLoad(self.running, self.waiting, 1, 10.0, self.latency)
        return {"idle": ReplicaLoad(0, 0, 1, 10.0), "busy": busy}

    def wait(self, paused=False):
        """Return the seconds until training may continue; None when it was stopped."""
        began, pausing = self.clock.now, threading.Event()
        if paused:
            pausing.set()
        may_train = self.capacity.wait(self.clock, pausing, self.states.append)
        return self.clock.now - began if may_train else None

    def give_way(self, must_end=lambda: False):
        began = self.clock.now
        self.capacity.give_way(must_end, self.states.append)
        return self.clock.now - began

    def work(self, seconds=0.1, computed=0.1):
        self.computed += computed
        self.clock.sleep(seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_training_waits_while_any_request_waits(clock):
    scene = Scene(clock, waiting=1)
    clock.at(0.2, lambda: setattr(scene, "waiting", 0))
    assert 0.2 <= scene.wait() + 1e-6 <= 0.3 + 2e-6
    assert set(scene.states) == {"yielding"}
    assert Scene(clock).wait() == 0, "running requests do not stop training"


def test_wait_reports_a_pause_and_ends_on_stop(clock):
    scene = Scene(clock)
    clock.at(0.1, clock.set)
    assert scene.wait(paused=True) is None
    assert set(scene.states) == {"paused"}


@pytest.mark.parametrize(
    ("objective", "latency", "spare"),
    [(None, 1e6, 0.5), (50.0, 50.0, 0.5), (50.0, 50.1, 0.0), (50.0, 0.0, 0.5)],
)
def test_spare_is_zero_above_the_latency_objective(clock, objective, latency, spare):
    assert Scene(clock, latency=latency, latency_objective_ms=objective, duty=0.5).capacity.spare() == spare


def test_unknown_loads_stop_training(clock):
    scene = Scene(clock)
    scene.is_down = True
    for _ in range(50):
        clock.now += 0.05
        assert scene.capacity.spare() == 0.0
    assert scene.reads == 3
    assert not scene.capacity.reachable


@pytest.mark.parametrize(
    ("trouble", "obstacle"),
    [
        ({}, ""),
        ({"waiting": 1}, "a request waits in a replica"),
        ({"latency": 51.0}, "the time between two tokens is above trainer.latency_objective_ms, 50 ms"),
        ({"pauses": True}, "a short random pause measures how much training slows requests"),
        ({"is_down": True}, "Redis does not answer, so the loads of replicas are unknown"),
    ],
    ids=["none", "queue", "latency", "pause", "Redis"],
)
def test_obstacle_says_why_training_waits(clock, trouble, obstacle):
    scene = Scene(clock, latency_objective_ms=50.0)
    for name, value in trouble.items():
        setattr(scene, name, value)
    assert (scene.capacity.spare() == 0) is bool(obstacle)
    assert scene.capacity.obstacle == obstacle
    for name in trouble:
        setattr(scene, name, 0)
    clock.now += 1.0
    assert scene.capacity.spare() > 0
    assert scene.capacity.obstacle == ""


def test_known_loads_stay_valid_for_five_seconds(clock, caplog):
    scene = Scene(clock, duty=0.5)
    assert scene.capacity.spare() == 0.5
    scene.is_down = True
    shares = []
    for _ in range(12):
        clock.now += 1.0
        shares.append(scene.capacity.spare())
    assert shares == [0.5] * 4 + [0.0] * 8
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    scene.is_down, scene.running = False, 0
    clock.now += 1.0
    assert scene.capacity.spare() == 1.0


@pytest.mark.parametrize(("duty", "running", "rest"), [(1.0, 3, 0.0), (0.25, 3, 0.3), (0.25, 0, 0.0)])
def test_training_rests_by_duty_while_requests_run(clock, duty, running, rest):
    scene = Scene(clock, running=running, duty=duty)
    with scene.capacity.working():
        scene.work()
    assert scene.wait() == pytest.approx(rest, abs=0.03)


def test_rest_follows_cpu_time_rather_than_wall_time(clock):
    scene = Scene(clock, duty=0.5)
    with scene.capacity.working():
        scene.work(seconds=0.3)
    assert scene.capacity.worked == pytest.approx(0.1)
    assert scene.wait() == 0


def test_rest_ends_with_the_last_request(clock):
    scene = Scene(clock, duty=0.01)
    with scene.capacity.working():
        scene.work()
    clock.at(0.2, lambda: setattr(scene, "running", 0))
    assert 0.2 <= scene.wait() + 1e-6 <= 0.3 + 2e-6


def test_micro_step_waits_while_a_request_waits(clock):
    scene = Scene(clock, waiting=1, running=0)
    clock.at(0.2, lambda: setattr(scene, "waiting", 0))
    with scene.capacity.working():
        assert 0.2 <= scene.give_way() + 1e-6 <= 0.3 + 2e-6
    assert set(scene.states) == {0.0}


def test_a_waiting_trainer_reads_the_loads_ten_times_a_second(clock):
    scene = Scene(clock, waiting=1)
    clock.at(2.0, lambda: setattr(scene, "waiting", 0))
    scene.wait()
    assert 20 <= scene.reads <= 22  # one at the start, and one that finds the machine free
    scene.waiting, scene.reads = 1, 0
    clock.at(2.0, lambda: setattr(scene, "waiting", 0))
    with scene.capacity.working():
        scene.give_way()
    assert 20 <= scene.reads <= 22  # one at the start, and one that finds the machine free


def test_micro_step_rests_by_duty(clock):
    scene = Scene(clock, duty=0.25)
    with scene.capacity.working():
        scene.computed += 0.1
        assert scene.give_way() == pytest.approx(0.4, abs=0.03)
    assert set(scene.states) == {0.25}


def test_micro_step_that_must_end_stops_waiting(clock):
    scene = Scene(clock, waiting=5)
    clock.at(0.1, clock.set)
    with scene.capacity.working():
        assert scene.give_way(clock.is_set) == pytest.approx(0.1, abs=0.03)


def test_micro_step_reads_the_loads_every_10_ms(clock):
    scene = Scene(clock, running=0)
    with scene.capacity.working():
        for _ in range(3000):
            scene.give_way()
            clock.now += 0.0001
    assert scene.reads == pytest.approx(0.3 / 0.01, abs=1)


def test_only_the_training_thread_gets_the_lowest_priority():
    policies = {}

    def train():
        lower_priority(1)
        policies["training"] = os.sched_getscheduler(threading.get_native_id())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert policies == {"training": os.SCHED_IDLE}
    assert os.sched_getscheduler(threading.get_native_id()) == os.SCHED_OTHER


def test_where_this_is_refused_training_gets_niceness_19(monkeypatch):
    def refuse(*arguments):
        raise PermissionError

    given = []
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "nice", given.append)
    thread = threading.Thread(target=lower_priority, args=[1])
    thread.start()
    thread.join()
    assert given == [19]


def serve(scene, idle, seconds):
    """Let ``idle`` of each second pass without a request."""
    for _ in range(seconds):
        for running, part in ((0, idle), (1, 1 - idle)):
            scene.running = running
            for _ in range(10):
                scene.clock.now += part / 10
                scene.capacity.spare()


def test_training_stays_out_of_requests_while_idle_time_suffices(clock):
    scene = Scene(clock, duty=0.2)
    serve(scene, 0.1, 300)
    assert scene.capacity.spare() == 0.2
    serve(scene, 0.3, 300)
    assert scene.capacity.spare() == 0
    assert scene.capacity.obstacle.startswith("no request ran in 3")
    assert scene.capacity.obstacle.endswith("% of the last minute, and training waits for such moments")
    scene.running = 0
    assert scene.capacity.spare() == 1
    serve(scene, 0.0, 60)
    assert scene.capacity.spare() == 0.2


def test_random_pauses_last_until_a_minute_after_requests(clock):
    scene = Scene(clock, duty=0.5, running=0)
    scene.pauses = True
    assert scene.capacity.spare() == 1
    scene.running = 1
    assert scene.capacity.spare() == 0
    scene.running = 0
    clock.now += 59.0
    assert scene.capacity.spare() == 0
    clock.now += 1.0
    assert scene.capacity.spare() == 1


def gradients(model, read):
    model.zero_grad()
    model(read).square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters()]


def test_each_layer_yields_and_gradients_stay_the_same():
    torch.manual_seed(0)
    layers = 5
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())))
    read, pauses = torch.randn(3, 8), []
    expected = gradients(model, read)
    with yielding(lambda: pauses.append(threading.get_ident())):
        loss = model(read).square().mean()
        forward = len(pauses)
        model.zero_grad()
        loss.backward()
    assert forward >= 2 * layers
    assert len(pauses) - forward >= 2 * layers
    assert set(pauses) == {threading.get_ident()}
    assert all(map(torch.equal, expected, [weight.grad for weight in model.parameters()]))


def test_frozen_model_with_gradients_yields_too():
    torch.manual_seed(0)
    frozen, pauses = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)).requires_grad_(False), []
    with yielding(lambda: pauses.append(0)):
        frozen(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert len(pauses) >= 6


def test_other_threads_do_not_yield():
    pauses = []
    with yielding(lambda: pauses.append(0)):
        thread = threading.Thread(target=gradients, args=(nn.Linear(4, 4), torch.randn(2, 4)))
        thread.start()
        thread.join()
    assert not pauses
