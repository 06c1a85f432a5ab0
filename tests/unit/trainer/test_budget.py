"""Compute budget of a worker: its turn among domains, spare capacity, pauses and the end."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from osd.economy.training import Decision
from tests.clocks import Clock
from tests.waiting import HANG_SECONDS
from trainer import budget as budget_module
from trainer import domain_scheduler as module
from trainer.budget import TrainingBudget
from trainer.domain_scheduler import DomainScheduler


class Room:
    """Spare capacity that exists as soon as ``room`` is set."""

    def __init__(self):
        self.room, self.obstacle = threading.Event(), "a request waits"

    def wait(self, stop, paused, set_state, patience):
        deadline = time.monotonic() + patience
        while not stop.is_set() and time.monotonic() < deadline:
            if paused.is_set():
                set_state("paused")
            elif self.room.is_set():
                return True
            else:
                set_state("yielding")
            stop.wait(0.01)
        return False

    def give_way(self, must_end, on_wait):
        while not must_end() and not self.room.is_set():
            on_wait(0.0)
            time.sleep(0.01)


@pytest.fixture
def scene():
    """Budget of domain a, with the scheduler, the capacity, and the reported states."""
    scheduler, room, states = DomainScheduler("ab"), Room(), []
    return TrainingBudget("a", scheduler, room, None, lambda *state: states.append(state)), scheduler, room, states


def test_wait_without_capacity_releases_the_turn(scene):
    budget, scheduler, room, states = scene
    turns_held = []

    def idle():
        turns_held.append(scheduler.holds("a"))
        if len(turns_held) == 3:
            room.room.set()

    assert budget.wait(idle)
    assert scheduler.holds("a")
    assert turns_held == [False] * 3, "without capacity other domains may have the turn"
    assert set(states) == {("yielding", "a request waits")}


def test_wait_for_the_turn_ends_after_the_patience(scene):
    budget, scheduler, room, states = scene
    room.room.set()
    assert scheduler.acquire("b", threading.Event())
    assert not budget.wait(lambda: None, 0.1)
    assert states == [("waiting", "another domain of this trainer has its turn")]
    scheduler.release("b")
    assert budget.wait(lambda: None, 5.0)


def test_wait_for_capacity_ends_after_the_patience(scene):
    budget, _, _, states = scene
    assert not budget.wait(lambda: None, 0.1)
    assert set(states) == {("yielding", "a request waits")}


def test_wait_for_the_turn_calls_idle(scene, monkeypatch):
    monkeypatch.setattr(budget_module, "_TURN_SECONDS", 0.01)
    budget, scheduler, room, _ = scene
    room.room.set()
    assert scheduler.acquire("b", threading.Event())
    calls = []

    def idle():
        calls.append(None)
        if len(calls) == 4:
            scheduler.release("b")

    assert budget.wait(idle)
    assert len(calls) == 4


def test_pause_waits_until_the_worker_rests(scene):
    budget, scheduler, room, states = scene
    room.room.set()
    assert not budget.pause(0.05), "no worker rests"
    results = []
    worker = threading.Thread(target=lambda: results.append(budget.wait(lambda: None)))
    worker.start()
    assert budget.pause(5)
    assert budget.paused
    assert ("paused", "") in states
    assert not scheduler.holds("a")
    budget.resume()
    worker.join(HANG_SECONDS)
    assert results == [True]
    budget.end()
    assert not budget.wait(lambda: None)


def test_give_way_keeps_the_turn_without_capacity(scene):
    budget, scheduler, room, states = scene
    room.room.set()
    assert budget.wait(lambda: None)
    room.room.clear()
    turns_held = []

    def idle():
        turns_held.append(scheduler.holds("a"))
        if len(turns_held) == 3:
            room.room.set()
        return False

    budget.give_way(idle)
    assert turns_held == [True] * 3, "no other domain could compute either"
    assert states == [*[("yielding", "a request waits")] * 3, ("training", "")]


@pytest.mark.parametrize("end", [lambda budget: budget.pause(0.0), lambda budget: budget.end()])
def test_sleep_ends_early_on_a_pause_or_the_end(scene, end):
    budget, *_ = scene
    began = time.monotonic()
    budget.sleep(0.3, lambda: None)
    budget.sleep(-0.5, pytest.fail)
    assert time.monotonic() - began >= 0.3
    worker = threading.Thread(target=budget.sleep, args=(60.0, lambda: None), daemon=True)
    worker.start()
    end(budget)
    worker.join(HANG_SECONDS)
    assert not worker.is_alive()


def test_sleep_calls_idle_regularly(scene, monkeypatch):
    budget, *_ = scene
    monkeypatch.setattr(budget_module, "_IDLE_SECONDS", 0.02)
    calls = []

    def idle():
        calls.append(1)
        if len(calls) == 3:
            budget.end()

    budget.sleep(60.0, idle)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("end", "idle_results"),
    [
        (lambda budget: budget.pause(0.0), itertools.repeat(False)),
        (lambda budget: budget.end(), itertools.repeat(False)),
        (lambda budget: None, iter([False, False, True])),
    ],
    ids=["a pause", "the end", "a purge"],
)
def test_give_way_ends_on_a_pause_the_end_or_a_purge(scene, end, idle_results):
    budget, *_ = scene
    worker = threading.Thread(target=budget.give_way, args=(lambda: next(idle_results),), daemon=True)
    worker.start()
    end(budget)
    worker.join(HANG_SECONDS)
    assert not worker.is_alive()


@pytest.fixture
def clock(monkeypatch):
    """Clock that advances only in turns."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def race(clock):
    """Let domains compute in turns, with steps of a given length; return the computing time of each domain."""
    threads: list[threading.Thread] = []
    stop = threading.Event()

    def start(turns: DomainScheduler, steps: dict[str, float], seconds: float) -> dict[str, float]:
        seconds_used, end = dict.fromkeys(steps, 0.0), clock.now + seconds
        inside: list[str] = []
        together = threading.Barrier(len(steps))

        def work(domain: str, step: float) -> None:
            together.wait()
            while turns.acquire(domain, stop):
                inside.append(domain)
                time.sleep(0.001)  # let the other domains start to wait
                assert inside == [domain], "two at a time"
                inside.clear()
                seconds_used[domain] += step
                clock.sleep(step)
                if clock.now >= end:
                    stop.set()

        threads.extend(threading.Thread(target=work, args=item) for item in steps.items())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()
        return seconds_used

    return start


def test_equal_domains_get_equal_time_with_unequal_steps(race):
    seconds_used = race(DomainScheduler("ab"), {"a": 0.01, "b": 0.03}, 3.0)
    assert seconds_used["a"] == pytest.approx(seconds_used["b"], rel=0.2)


def test_most_valuable_domain_gets_the_turn(race, clock):
    turns = DomainScheduler("ab")
    turns.set_value("b", 1.0)
    turns.set_value("a", 3.0)
    clock.at(0.5, lambda: turns.set_value("a", 0.5))
    seconds_used = race(turns, {"a": 0.01, "b": 0.01}, 1.0)
    assert seconds_used["a"] == pytest.approx(0.5, rel=0.2)
    assert seconds_used["b"] == pytest.approx(0.5, rel=0.2)


def test_acquire_gives_up_after_the_patience():
    turns, stop = DomainScheduler("ab"), threading.Event()
    assert turns.acquire("a", stop)
    began = time.monotonic()
    assert not turns.acquire("b", stop, 0.2)
    assert time.monotonic() - began >= 0.2
    turns.set_value("b", 1.0)  # a domain that gave up does not block others
    assert turns.acquire("a", stop, 5.0)


def test_resting_domain_does_not_save_time(race, clock):
    turns, stop = DomainScheduler("ab"), threading.Event()
    for _ in range(50):
        assert turns.acquire("a", stop)
        clock.sleep(0.1)
    turns.release("a")
    seconds_used = race(turns, {"a": 0.01, "b": 0.01}, 0.4)
    assert seconds_used["a"] > 0.1, "domain b, with less computing time, does not catch up first"


def test_acquire_returns_false_after_the_end():
    turns, stop = DomainScheduler("ab"), threading.Event()
    assert turns.acquire("a", stop)
    threading.Timer(0.05, stop.set).start()
    assert not turns.acquire("b", stop)
    turns.release("b")
    assert turns.holds("a")
    stop.clear()
    turns.release("a")
    assert turns.acquire("b", stop)


def test_cpu_seconds_belong_to_the_turn_or_to_all_domains():
    seconds_used = 1.0
    turns, stop = DomainScheduler("ab", lambda: seconds_used), threading.Event()
    seconds_used = 2.0
    turns.join("c")
    seconds_used = 5.0
    assert [turns.cpu_seconds(domain) for domain in "abc"] == [1.5, 1.5, 1.0]
    assert turns.acquire("a", stop)
    seconds_used = 6.0
    assert [turns.cpu_seconds(domain) for domain in "abc"] == [2.5, 1.5, 1.0]
    turns.leave("a")
    assert turns.acquire("b", stop)  # the turn of a removed domain is free
    seconds_used = 10.0
    assert [turns.cpu_seconds(domain) for domain in "bc"] == [5.5, 1.0]
    turns.join("a")
    assert turns.cpu_seconds("a") == 0.0


def test_late_domain_starts_level_with_the_others(race, clock):
    turns, stop = DomainScheduler("a"), threading.Event()
    assert turns.acquire("a", stop)
    clock.sleep(2.0)
    turns.release("a")
    assert turns.acquire("a", stop)
    turns.release("a")
    turns.join("b")
    seconds_used = race(turns, {"a": 0.01, "b": 0.01}, 0.5)
    assert seconds_used["b"] == pytest.approx(seconds_used["a"], rel=0.5)


@pytest.mark.parametrize(("decision", "reason"), [
    (None, ""), (Decision(True, -1.0, 0.0), ""),
    (Decision(False, 3.0, 15.0), "the fund of training holds 3.0 of 15.0 core seconds for a version"),
    (Decision(False, -1.5, 0.0), "the fund of training is overdrawn by 1.5 core seconds"),
])  # fmt: skip
def test_missing_says_what_the_fund_lacks(decision, reason):
    investor = SimpleNamespace(next_slice=lambda learner: decision, worth=lambda learner: 1.0)
    budget = TrainingBudget("a", DomainScheduler("ab"), Room(), investor, lambda *state: None)
    assert budget.missing(None) == reason
