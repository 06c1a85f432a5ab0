"""When a worker computes: its turn among domains, what serving leaves, pauses and the end."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from tests.clocks import Clock
from tests.waiting import HANG_SECONDS
from trainer import budget
from trainer import domain_scheduler as module
from trainer.budget import TrainingBudget
from trainer.domain_scheduler import DomainScheduler


class Room:
    """Serving that leaves room as soon as ``room`` is set."""

    def __init__(self):
        self.room = threading.Event()

    def wait(self, stop, paused, say):
        while not stop.is_set():
            if paused.is_set():
                say("paused")
            elif self.room.is_set():
                return True
            else:
                say("yielding")
            stop.wait(0.01)
        return False

    def give_way(self, leave, look):
        while not leave() and not self.room.is_set():
            look(0.0)
            time.sleep(0.01)


@pytest.fixture
def scene():
    """A worker's time beside another domain's turns, what it said, and serving."""
    scheduler, room, said = DomainScheduler("ab"), Room(), []
    return TrainingBudget("a", scheduler, room, None, lambda *state: said.append(state)), scheduler, room, said


def test_it_waits_for_room_and_looks_around_meanwhile(scene):
    spare, scheduler, room, said = scene
    looks = []

    def look():
        looks.append(scheduler.has("a"))
        if len(looks) == 3:
            room.room.set()

    assert spare.wait(look)
    assert scheduler.has("a")
    assert looks == [False] * 3, "who cannot compute leaves the turn to others"
    assert set(said) == {("yielding", "")}


def test_while_another_domain_has_the_turn_it_comes_back_to_what_else_there_is(scene):
    spare, scheduler, room, _ = scene
    room.room.set()
    assert scheduler.take("b", threading.Event())
    assert not spare.wait(lambda: None, 0.1)
    scheduler.give("b")
    assert spare.wait(lambda: None, 5.0)


def test_a_pause_waits_until_the_worker_rests_and_the_end_ends_everything(scene):
    spare, scheduler, room, said = scene
    room.room.set()
    assert not spare.pause(0.05), "nobody rests"
    results = []
    worker = threading.Thread(target=lambda: results.append(spare.wait(lambda: None)))
    worker.start()
    assert spare.pause(5)
    assert spare.paused
    assert ("paused", "") in said
    assert not scheduler.has("a")
    spare.resume()
    worker.join(HANG_SECONDS)
    assert results == [True]
    spare.end()
    assert not spare.wait(lambda: None)


def test_within_a_micro_step_it_keeps_its_turn_and_looks_around_while_serving_leaves_no_room(scene):
    spare, scheduler, room, said = scene
    room.room.set()
    assert spare.wait(lambda: None)
    room.room.clear()
    looks = []

    def look():
        looks.append(scheduler.has("a"))
        if len(looks) == 3:
            room.room.set()
        return False

    spare.give_way(look)
    assert looks == [True] * 3, "nobody else could compute either"
    assert set(said) == {("yielding", "")}


@pytest.mark.parametrize("ends", [lambda spare: spare.pause(0.0), lambda spare: spare.end()])
def test_sleep_is_as_long_as_it_is_said_and_a_pause_or_the_end_cut_it_short(scene, ends):
    spare, *_ = scene
    began = time.monotonic()
    spare.sleep(0.3, lambda: None)
    spare.sleep(-0.5, pytest.fail)
    assert time.monotonic() - began >= 0.3
    worker = threading.Thread(target=spare.sleep, args=(60.0, lambda: None), daemon=True)
    worker.start()
    ends(spare)
    worker.join(HANG_SECONDS)
    assert not worker.is_alive()


def test_who_sleeps_long_is_heard_of_now_and_then(scene, monkeypatch):
    spare, *_ = scene
    monkeypatch.setattr(budget, "_GLANCE", 0.02)
    heard = []

    def idle():
        heard.append(1)
        if len(heard) == 3:
            spare.end()

    spare.sleep(60.0, idle)
    assert len(heard) == 3


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        (lambda spare: spare.pause(0.0), itertools.repeat(False)),
        (lambda spare: spare.end(), itertools.repeat(False)),
        (lambda spare: None, iter([False, False, True])),
    ],
    ids=["a pause", "the end", "what is wanted elsewhere"],
)
def test_a_pause_the_end_and_what_is_wanted_elsewhere_end_the_wait_in_a_micro_step(scene, ends, wanted):
    spare, *_ = scene
    worker = threading.Thread(target=spare.give_way, args=(lambda: next(wanted),), daemon=True)
    worker.start()
    ends(spare)
    worker.join(HANG_SECONDS)
    assert not worker.is_alive()


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in turns."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def race(clock):
    """Let domains compute in turns, each step as long as it says; return how long each computed in all."""
    threads: list[threading.Thread] = []
    stop = threading.Event()

    def start(turns: DomainScheduler, steps: dict[str, float], seconds: float) -> dict[str, float]:
        spent, end = dict.fromkeys(steps, 0.0), clock.now + seconds
        inside: list[str] = []
        together = threading.Barrier(len(steps))

        def work(domain: str, step: float) -> None:
            together.wait()
            while turns.take(domain, stop):
                inside.append(domain)
                time.sleep(0.001)  # the others come to wait
                assert inside == [domain], "two at a time"
                inside.clear()
                spent[domain] += step
                clock.sleep(step)
                if clock.now >= end:
                    stop.set()

        threads.extend(threading.Thread(target=work, args=item) for item in steps.items())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()
        return spent

    return start


def test_each_domain_gets_the_same_time_however_long_its_steps_are(race):
    spent = race(DomainScheduler("ab"), {"a": 0.01, "b": 0.03}, 3.0)
    assert spent["a"] == pytest.approx(spent["b"], rel=0.2)


def test_the_domain_that_is_worth_more_computes_until_it_is_no_longer(race, clock):
    turns = DomainScheduler("ab")
    turns.value("b", 1.0)
    turns.value("a", 3.0)
    clock.at(0.5, lambda: turns.value("a", 0.5))
    spent = race(turns, {"a": 0.01, "b": 0.01}, 1.0)
    assert spent["a"] == pytest.approx(0.5, rel=0.2)
    assert spent["b"] == pytest.approx(0.5, rel=0.2)


def test_a_domain_that_waits_without_getting_the_turn_gives_up_after_its_patience():
    turns, stop = DomainScheduler("ab"), threading.Event()
    assert turns.take("a", stop)
    began = time.monotonic()
    assert not turns.take("b", stop, 0.2)
    assert time.monotonic() - began >= 0.2
    turns.value("b", 1.0)  # who waits no more is not in the way of others
    assert turns.take("a", stop, 5.0)


def test_a_domain_alone_never_waits_and_its_rest_is_not_saved_up(race, clock):
    turns, stop = DomainScheduler("ab"), threading.Event()
    for _ in range(50):
        assert turns.take("a", stop)
        clock.sleep(0.1)
    turns.give("a")
    spent = race(turns, {"a": 0.01, "b": 0.01}, 0.4)
    assert spent["a"] > 0.1, "b, which has computed far less so far, does not catch up with it first"


def test_a_turn_that_nobody_gives_back_is_not_waited_for_after_the_end():
    turns, stop = DomainScheduler("ab"), threading.Event()
    assert turns.take("a", stop)
    threading.Timer(0.05, stop.set).start()
    assert not turns.take("b", stop)
    turns.give("b")
    assert turns.has("a")
    stop.clear()
    turns.give("a")
    assert turns.take("b", stop)


def test_cpu_seconds_belong_to_the_domain_that_has_the_turn_and_else_to_all():
    spent = 1.0
    turns, stop = DomainScheduler("ab", lambda: spent), threading.Event()
    spent = 2.0
    turns.join("c")
    spent = 5.0
    assert [turns.clock(domain) for domain in "abc"] == [1.5, 1.5, 1.0]
    assert turns.take("a", stop)
    spent = 6.0
    assert [turns.clock(domain) for domain in "abc"] == [2.5, 1.5, 1.0]
    turns.leave("a")
    assert turns.take("b", stop)  # nobody has to give back the turn of a domain that left
    spent = 10.0
    assert [turns.clock(domain) for domain in "bc"] == [5.5, 1.0]
    turns.join("a")
    assert turns.clock("a") == 0.0


def test_a_domain_that_joins_late_is_level_with_the_others(race, clock):
    turns, stop = DomainScheduler("a"), threading.Event()
    assert turns.take("a", stop)
    clock.sleep(2.0)
    turns.give("a")
    assert turns.take("a", stop)
    turns.give("a")
    turns.join("b")
    spent = race(turns, {"a": 0.01, "b": 0.01}, 0.5)
    assert spent["b"] == pytest.approx(spent["a"], rel=0.5)
