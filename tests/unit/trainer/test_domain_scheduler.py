"""Whose turn it is to compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from trainer.domain_scheduler import DomainScheduler


@pytest.fixture
def race():
    """Lets domains compute in turns, each step as long as it says, and tells how long each computed in all."""
    threads: list[threading.Thread] = []
    stop = threading.Event()

    def start(turns: DomainScheduler, steps: dict[str, float], seconds: float) -> dict[str, float]:
        spent = dict.fromkeys(steps, 0.0)
        inside: list[str] = []

        def work(domain: str, step: float) -> None:
            while turns.take(domain, stop):
                inside.append(domain)
                began = time.monotonic()
                time.sleep(step)
                assert inside == [domain], "two at a time"
                inside.clear()
                spent[domain] += time.monotonic() - began

        threads.extend(threading.Thread(target=work, args=item) for item in steps.items())
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        return spent

    return start


def test_each_gets_the_same_time_however_long_its_steps_are(race: Callable[..., dict[str, float]]):
    spent = race(DomainScheduler("ab"), {"a": 0.01, "b": 0.03}, 0.6)
    assert spent["a"] == pytest.approx(spent["b"], rel=0.3)


def test_the_one_that_is_worth_more_computes_until_it_is_no_longer(race: Callable[..., dict[str, float]]):
    turns = DomainScheduler("ab")
    turns.value("b", 1.0)
    turns.value("a", 3.0)
    threading.Timer(0.4, turns.value, ("a", 0.5)).start()
    spent = race(turns, {"a": 0.01, "b": 0.01}, 0.8)
    assert spent["a"] == pytest.approx(0.4, rel=0.3)
    assert spent["b"] == pytest.approx(0.4, rel=0.3)


def test_who_is_not_worth_most_can_wait_for_a_while_only():
    turns, stop = DomainScheduler("ab"), threading.Event()
    assert turns.take("a", stop)
    began = time.monotonic()
    assert not turns.take("b", stop, 0.2)
    assert 0.2 <= time.monotonic() - began < 2
    turns.value("b", 1.0)  # who waits no more is not in the way of others
    assert turns.take("a", stop, 0.2)


def test_one_alone_never_waits_and_rest_is_not_saved_up():
    turns, stop = DomainScheduler("ab"), threading.Event()
    began = time.monotonic()
    for _ in range(50):
        assert turns.take("a", stop)
        time.sleep(0.002)
    assert time.monotonic() - began < 1
    order: list[str] = []
    first = threading.Event()

    def late() -> None:
        for _ in range(10):
            assert turns.take("b", stop)
            order.append("b")
            time.sleep(0.01)
            first.set()
        turns.give("b")

    thread = threading.Thread(target=late)
    thread.start()
    turns.give("a")
    first.wait(5)
    for _ in range(8):
        assert turns.take("a", stop)
        order.append("a")
        time.sleep(0.01)
    turns.give("a")
    thread.join(5)
    assert order[:10].count("a") >= 3, "b, which has computed far less so far, does not catch up with it first"


def test_a_turn_that_nobody_gives_back_is_not_waited_for_after_the_end():
    turns, stop = DomainScheduler("ab"), threading.Event()
    assert turns.take("a", stop)
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    assert not turns.take("b", stop)
    assert time.monotonic() - began < 2
    turns.give("b")
    stop.clear()
    turns.give("a")
    assert turns.take("b", stop)


def test_cpu_seconds_belong_to_who_has_the_turn_and_to_all_when_nobody_has():
    def compute(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    turns, stop = DomainScheduler("abc"), threading.Event()
    began = time.process_time()
    before = {domain: turns.clock(domain) for domain in "abc"}
    assert turns.take("a", stop)
    compute(0.2)
    assert turns.clock("a") - before["a"] >= 0.2
    turns.give("a")
    compute(0.3)
    spent = {domain: turns.clock(domain) - before[domain] for domain in "abc"}
    assert spent["a"] == pytest.approx(0.3, abs=0.05)
    assert [spent["b"], spent["c"]] == pytest.approx([0.1, 0.1], abs=0.03)
    assert sum(spent.values()) == pytest.approx(time.process_time() - began, abs=0.01)


def test_a_domain_that_joins_is_charged_from_then_on_and_what_one_that_left_was_charged_stays_its_own():
    spent = 0.0
    turns, stop = DomainScheduler("a", lambda: spent), threading.Event()
    spent = 1.0
    turns.join("b")
    spent = 3.0
    assert (turns.clock("a"), turns.clock("b")) == (2.0, 1.0)
    assert turns.take("a", stop)
    turns.leave("a")
    assert turns.take("b", stop)  # nobody has to give a turn back that was of a domain which left
    spent = 7.0
    assert turns.clock("b") == 5.0
    turns.join("a")
    assert turns.clock("a") == 0.0


def test_a_domain_that_joins_late_is_level_with_the_others(race):
    turns, stop = DomainScheduler("a"), threading.Event()
    assert turns.take("a", stop)
    time.sleep(0.2)
    turns.give("a")
    assert turns.take("a", stop)
    turns.give("a")
    turns.join("b")
    spent = race(turns, {"a": 0.01, "b": 0.01}, 0.3)
    assert spent["b"] == pytest.approx(spent["a"], rel=0.5)
