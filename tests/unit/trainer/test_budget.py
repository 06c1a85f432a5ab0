"""When a worker computes: its turn, what serving leaves, pauses and the end."""

from __future__ import annotations

import threading
import time

import pytest

from trainer import budget
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
    worker.join(5)
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
    worker.join(5)
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


@pytest.mark.parametrize("ends", [lambda spare: spare.pause(0.0), lambda spare: spare.end()])
def test_a_pause_or_the_end_waits_for_no_more_than_the_rest_of_a_micro_step(scene, ends):
    spare, *_ = scene
    worker = threading.Thread(target=spare.give_way, args=(lambda: False,), daemon=True)
    worker.start()
    ends(spare)
    worker.join(5)
    assert not worker.is_alive()


def test_who_is_wanted_elsewhere_stands_still_no_longer(scene):
    spare, *_ = scene
    wanted = iter([False, False, True])
    worker = threading.Thread(target=spare.give_way, args=(lambda: next(wanted),), daemon=True)
    worker.start()
    worker.join(5)
    assert not worker.is_alive()
    assert next(wanted, None) is None
