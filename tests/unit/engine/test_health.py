"""An engine says the truth about itself, and what fails for one request fails for no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.engine import health, loop
from osd.engine.health import FAILED_REQUESTS, FAILED_ROUNDS, FIRST_SECONDS, LEAST_SECONDS, TIMES_LONGEST, Health
from osd.engine.sequence import Sequence
from osd.engine.text import TextStream
from osd.engine.trace_builder import TraceBuilder
from tests.unit.engine.harness import Client, Oracle, prompts, running, tokens_of
from tests.waiting import HANG_SECONDS


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rounds_that_fail_one_after_the_other_are_told_with_the_last_reason() -> None:
    it = Health(Clock())
    it.working()
    for _ in range(FAILED_ROUNDS - 1):
        it.round_failed("MemoryError")
    it.check()
    it.round_failed("RuntimeError")
    with pytest.raises(RuntimeError, match=f"the last {FAILED_ROUNDS} rounds of decoding failed, .* RuntimeError"):
        it.check()
    it.round_ended()
    it.check()


def test_requests_that_fail_by_themselves_are_told_only_when_none_ends_any_more() -> None:
    it = Health(Clock())
    for _ in range(FAILED_REQUESTS - 1):
        it.request_failed("ValueError")
    it.request_ended()
    it.request_failed("ValueError")
    it.check()
    for _ in range(FAILED_REQUESTS - 1):
        it.request_failed("ValueError")
    with pytest.raises(RuntimeError, match=f"the last {FAILED_REQUESTS} requests failed, the last one with ValueError"):
        it.check()


def test_a_round_may_take_a_while_and_no_longer() -> None:
    clock = Clock()
    it = Health(clock)
    clock.now += 10 * FIRST_SECONDS
    it.check()  # nothing to do is no failure
    it.working()
    clock.now += FIRST_SECONDS
    it.check()
    clock.now += 1
    with pytest.raises(RuntimeError, match=r"no round of decoding has ended for 601 s .* none has ended before"):
        it.check()
    it.resting()
    it.working()
    clock.now += 1.0
    it.round_ended()
    clock.now += LEAST_SECONDS
    it.check()
    clock.now += 1
    with pytest.raises(RuntimeError, match=r"for 61 s while requests wait, the longest before took 1\.0 s"):
        it.check()


def test_how_long_a_round_may_take_grows_with_the_longest() -> None:
    clock = Clock()
    it = Health(clock)
    it.working()
    clock.now += 30
    it.round_ended()
    it.working()
    clock.now += 30 * TIMES_LONGEST
    it.check()
    clock.now += 1
    with pytest.raises(RuntimeError, match="no round"):
        it.check()


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def ill(client: Client) -> bool:
    try:
        client.engine.check_health()
    except RuntimeError:
        return True
    return False


def test_an_engine_whose_rounds_all_fail_is_ill_and_well_again_after_one_that_does_not(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(target_dir, slots=1) as client:
        with monkeypatch.context() as patched:
            patched.setattr(loop, "verify", raising(RuntimeError("the device is lost")))
            for number in range(FAILED_ROUNDS):
                assert not ill(client)
                client.submit(f"{number}", [1, 2, 3], 4)
                assert client.wait()[f"{number}"].finish == "error"
            until(lambda: ill(client))
            with pytest.raises(RuntimeError, match="the last one with RuntimeError"):
                client.engine.check_health()
        client.submit("well", [1, 2, 3], 4, ignore_eos=True)
        assert client.wait()["well"].finish == "length"
        until(lambda: not ill(client))


@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_requests_that_end_by_themselves_count_as_no_failures(target_dir: Path, kind: str) -> None:
    with running(target_dir, kind, slots=16) as client:
        for number in range(FAILED_REQUESTS + 1):
            client.submit(f"{number}", [1 + number], 2, ignore_eos=True)
        client.wait()
        client.settled()
        client.engine.check_health()


def test_an_engine_that_hangs_in_a_round_is_ill_and_says_so_at_once(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LEAST_SECONDS", 0.2)
    go_on = threading.Event()
    with running(target_dir) as client:
        client.submit("first", [1, 2, 3], 4)
        client.wait()
        with monkeypatch.context() as patched:
            healthy = loop.verify

            def hangs(*arguments: Any) -> Any:
                with client.engine.loop.changed:  # whoever asks how the engine is must not need its lock
                    go_on.wait(HANG_SECONDS)
                return healthy(*arguments)

            patched.setattr(loop, "verify", hangs)
            patched.setattr(health, "TIMES_LONGEST", 1.0)
            client.submit("hangs", [1, 2, 3], 4)
            try:
                until(lambda: ill(client))
                with pytest.raises(RuntimeError, match="no round of decoding has ended for"):
                    client.engine.check_health()
            finally:
                go_on.set()
        assert client.wait()["hangs"].finish in ("stop", "length")
        until(lambda: not ill(client))


def test_a_thread_that_ends_by_an_error_leaves_nobody_waiting(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()

    def measure(*_: object) -> None:
        failing.wait(HANG_SECONDS)
        raise MemoryError("no memory")

    monkeypatch.setattr(loop, "calibrate", measure)
    with running(target_dir, "eagle") as client:
        client.submit("r", [1, 2, 3], 4)
        failing.set()
        result = client.wait()["r"]
        assert (result.finish, result.error) == ("error", "MemoryError while decoding")
        until(lambda: ill(client))
        with pytest.raises(ValueError, match="the engine is stopping"):
            client.submit("later", [1], 1)


def raising(error: Exception) -> Callable[..., Any]:
    def fails(*_: object, **__: object) -> Any:
        raise error

    return fails


@contextmanager
def failing_for(name: str, of: type, method: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have a method fail for the objects that ``name`` marks, and for no others."""
    original, failed = getattr(of, method), []

    def fails(self: Any, *arguments: Any, **more: Any) -> Any:
        if getattr(self, "bad", None) == name:
            failed.append(method)
            raise RuntimeError("this one only")
        return original(self, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(of, method, fails)
        yield failed


PLACES = [
    (TextStream, "push"),
    (TextStream, "take"),
    (Sequence, "append"),
    (Sequence, "report"),
    (Sequence, "begin"),
    (Sequence, "hand_on"),
]


@pytest.mark.parametrize(("of", "method"), PLACES, ids=[f"{of.__name__}.{method}" for of, method in PLACES])
def test_what_fails_for_one_request_fails_for_no_other_and_gives_its_slot_back(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, of: type, method: str
) -> None:
    prompt = prompts([9], seed=4)[0]
    goal = oracle.greedy(prompt, 24)
    made = of.__init__  # type: ignore[misc]

    def mark(self: Any, *arguments: Any, **more: Any) -> None:
        made(self, *arguments, **more)
        if of is Sequence:
            self.bad = "bad" if self.request.id == "bad" else None
        else:
            self.bad = "bad" if arguments[-1] == ("never said",) else None

    monkeypatch.setattr(of, "__init__", mark)
    with running(target_dir, "eagle", slots=2) as client, failing_for("bad", of, method, monkeypatch) as failed:
        client.submit("good", prompt, 24, ignore_eos=True)
        client.submit("bad", prompt, 24, ignore_eos=True, stop=("never said",), logprobs=1)
        client.submit("waiting", prompt, 24, ignore_eos=True)
        client.submit("another", prompt, 24, ignore_eos=True)
        results = client.wait()
        assert failed
        assert (results["bad"].finish, results["bad"].error) == ("error", "RuntimeError while decoding")
        for name in ("good", "waiting", "another"):
            assert (results[name].finish, results[name].tokens) == ("length", goal), name
        assert client.engine.counters().failed == 1
        until(lambda: client.engine.load().running == 0)
        assert client.engine.pool.own.users == 0
        client.engine.check_health()


@pytest.mark.parametrize("fails", ["add", "build", "sink"])
def test_a_trace_that_cannot_be_built_or_kept_costs_no_answer(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    asked, broken = prompts([9, 9], seed=4), raising(RuntimeError("no trace"))
    traces: Any = SimpleNamespace(append=broken) if fails == "sink" else []
    if fails != "sink":
        monkeypatch.setattr(TraceBuilder, fails, broken)
    with running(target_dir, "eagle", traces=traces, segment=16) as client:
        assert tokens_of(client.ask(asked, 40, capture=True)) == oracle.all(asked, 40)
        assert client.engine.counters().failed == 0


def test_a_drafter_that_cannot_let_a_request_go_keeps_no_slot(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(target_dir, "eagle", slots=1) as client:
        monkeypatch.setattr(client.engine.pool.own.session, "close", raising(RuntimeError("stuck")))  # type: ignore[union-attr]
        for name in "abc":
            client.submit(name, [1, 2, 3], 8, ignore_eos=True)
        assert {result.finish for result in client.wait().values()} == {"length"}
        until(lambda: client.engine.load().running == 0)
        client.engine.check_health()
