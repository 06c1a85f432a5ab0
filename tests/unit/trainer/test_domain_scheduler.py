"""Whose turn it is to compute."""

from __future__ import annotations

import threading
import time

import pytest

from tests.unit.trainer.clocks import FakeTime
from trainer import domain_scheduler as module
from trainer.domain_scheduler import DomainScheduler


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in turns."""
    clock = FakeTime()
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
            thread.join(30)
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
