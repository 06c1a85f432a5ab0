"""Health of an engine, and isolation of errors of one request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.engine import health, loop
from osd.engine.health import (
    FIRST_STEP_SECONDS,
    LONGEST_STEP_FACTOR,
    MAX_FAILED_REQUESTS,
    MAX_FAILED_STEPS,
    MIN_LIMIT_SECONDS,
    Health,
)
from osd.engine.sequence import SequenceState
from osd.engine.text import TextStream
from osd.engine.trace_builder import TraceBuilder
from tests.clocks import Clock
from tests.unit.engine.harness import Client, Oracle, prompts, running, tokens_of
from tests.waiting import HANG_SECONDS, wait_until


def test_health_reports_consecutive_failed_steps() -> None:
    engine_health = Health(Clock())
    engine_health.begin_work()
    for _ in range(MAX_FAILED_STEPS - 1):
        engine_health.step_failed("MemoryError")
    engine_health.check()
    engine_health.step_failed("RuntimeError")
    with pytest.raises(RuntimeError, match=f"the last {MAX_FAILED_STEPS} decoding steps failed, .* RuntimeError"):
        engine_health.check()
    engine_health.step_ended()
    engine_health.check()


def test_health_reports_consecutive_failed_requests() -> None:
    engine_health = Health(Clock())
    for _ in range(MAX_FAILED_REQUESTS - 1):
        engine_health.request_failed("ValueError")
    engine_health.request_ended()
    engine_health.request_failed("ValueError")
    engine_health.check()
    for _ in range(MAX_FAILED_REQUESTS - 1):
        engine_health.request_failed("ValueError")
    with pytest.raises(
        RuntimeError, match=f"the last {MAX_FAILED_REQUESTS} requests failed, the last one with ValueError"
    ):
        engine_health.check()


def test_health_limits_the_duration_of_a_step() -> None:
    clock = Clock()
    engine_health = Health(clock)
    clock.now += 10 * FIRST_STEP_SECONDS
    engine_health.check()  # idle time is not a failure
    engine_health.begin_work()
    clock.now += FIRST_STEP_SECONDS
    engine_health.check()
    clock.now += 1
    with pytest.raises(RuntimeError, match=r"no decoding step has ended for 601 s .* none has ended before"):
        engine_health.check()
    engine_health.end_work()
    engine_health.begin_work()
    clock.now += 1.0
    engine_health.step_ended()
    clock.now += MIN_LIMIT_SECONDS
    engine_health.check()
    clock.now += 1
    with pytest.raises(RuntimeError, match=r"for 61 s while requests wait, the longest before took 1\.0 s"):
        engine_health.check()
    engine_health.step_ended()
    clock.now += 61 * LONGEST_STEP_FACTOR  # the limit grows with the longest step
    engine_health.check()
    clock.now += 2
    with pytest.raises(RuntimeError, match="no decoding step"):
        engine_health.check()


def is_unhealthy(client: Client) -> bool:
    try:
        client.engine.check_health()
    except RuntimeError:
        return True
    return False


def test_engine_is_unhealthy_while_all_steps_fail(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(target_dir, slots=1) as client:
        with monkeypatch.context() as patched:
            patched.setattr(loop, "launch", raising(RuntimeError("the device is lost")))
            for number in range(MAX_FAILED_STEPS):
                assert not is_unhealthy(client)
                client.submit(f"{number}", [1, 2, 3], 4)
                assert client.wait()[f"{number}"].finish == "error"
            wait_until(lambda: is_unhealthy(client))
            with pytest.raises(RuntimeError, match="the last one with RuntimeError"):
                client.engine.check_health()
        client.submit("well", [1, 2, 3], 4, ignore_eos=True)
        assert client.wait()["well"].finish == "length"
        wait_until(lambda: not is_unhealthy(client))


@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_finished_requests_do_not_count_as_failures(target_dir: Path, kind: str) -> None:
    with running(target_dir, kind, slots=16) as client:
        for number in range(MAX_FAILED_REQUESTS + 1):
            client.submit(f"{number}", [1 + number], 2, ignore_eos=True)
        client.wait()
        client.settled()
        client.engine.check_health()


def test_hanging_engine_reports_itself_without_a_lock(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MIN_LIMIT_SECONDS", 0.2)
    go_on = threading.Event()
    with running(target_dir) as client:
        client.submit("first", [1, 2, 3], 4)
        client.wait()
        with monkeypatch.context() as patched:
            healthy = loop.launch

            def hangs(*arguments: Any) -> Any:
                with client.engine.loop.changed:  # a health check must not need the lock
                    go_on.wait(HANG_SECONDS)
                return healthy(*arguments)

            patched.setattr(loop, "launch", hangs)
            patched.setattr(health, "LONGEST_STEP_FACTOR", 1.0)
            client.submit("hangs", [1, 2, 3], 4)
            try:
                wait_until(lambda: is_unhealthy(client))
                with pytest.raises(RuntimeError, match="no decoding step has ended for"):
                    client.engine.check_health()
            finally:
                go_on.set()
        assert client.wait()["hangs"].finish in ("stop", "length")
        wait_until(lambda: not is_unhealthy(client))


def test_crashed_engine_thread_fails_all_requests(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        wait_until(lambda: is_unhealthy(client))
        with pytest.raises(ValueError, match="the engine is stopping"):
            client.submit("later", [1], 1)


def raising(error: Exception) -> Callable[..., Any]:
    def fails(*_: object, **__: object) -> Any:
        raise error

    return fails


PLACES = [
    (TextStream, "push"), (TextStream, "take"), (SequenceState, "append"), (SequenceState, "report"),
    (SequenceState, "start_drafting"), (SequenceState, "deliver"),
]  # fmt: skip


@pytest.mark.parametrize(("of", "method"), PLACES, ids=[f"{of.__name__}.{method}" for of, method in PLACES])
def test_error_of_one_request_does_not_affect_others(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, of: type, method: str
) -> None:
    prompt = prompts([9], seed=4)[0]
    goal = oracle.greedy(prompt, 24)
    made, original, failed = of.__init__, getattr(of, method), []  # type: ignore[misc]

    def mark(self: Any, *arguments: Any, **more: Any) -> None:
        made(self, *arguments, **more)
        self.is_bad = self.request.id == "bad" if of is SequenceState else arguments[1] == ("never said",)

    def fails(self: Any, *arguments: Any, **more: Any) -> Any:
        if getattr(self, "is_bad", False):
            failed.append(method)
            raise RuntimeError("only this object")
        return original(self, *arguments, **more)

    monkeypatch.setattr(of, "__init__", mark)
    monkeypatch.setattr(of, method, fails)
    with running(target_dir, "eagle", slots=2) as client:
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
        wait_until(lambda: client.engine.load().running == 0)
        assert client.engine.pool.default.users == 0
        client.engine.check_health()


@pytest.mark.parametrize("method", ["push", "take"])
def test_errors_of_requests_own_texts_leave_the_engine_healthy(target_dir: Path, monkeypatch, method: str):
    monkeypatch.setattr(TextStream, method, raising(RuntimeError("this text")))
    with running(target_dir, "eagle", slots=8) as client:
        for number in range(MAX_FAILED_REQUESTS + 1):
            client.submit(f"{number}", [1, 2, 3], 4)
        assert {result.error for result in client.wait().values()} == {"RuntimeError while decoding"}
        client.settled()
        client.engine.check_health()
        assert client.engine.counters().failed == MAX_FAILED_REQUESTS + 1


@pytest.mark.parametrize("fails", ["add", "build", "sink"])
def test_failed_trace_does_not_fail_the_answer(target_dir: Path, oracle: Oracle, monkeypatch, fails: str):
    texts, broken = prompts([9, 9], seed=4), raising(RuntimeError("no trace"))
    traces: Any = SimpleNamespace(append=broken) if fails == "sink" else []
    if fails != "sink":
        monkeypatch.setattr(TraceBuilder, fails, broken)
    with running(target_dir, "eagle", traces=traces, segment=16) as client:
        assert tokens_of(client.ask(texts, 40, capture=True)) == oracle.all(texts, 40)
        assert client.engine.counters().failed == 0


def test_slot_is_freed_when_the_drafter_fails_to_close_it(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(target_dir, "eagle", slots=1) as client:
        monkeypatch.setattr(client.engine.pool.default.session, "close", raising(RuntimeError("stuck")))  # type: ignore[union-attr]
        for name in "abc":
            client.submit(name, [1, 2, 3], 8, ignore_eos=True)
        assert {result.finish for result in client.wait().values()} == {"length"}
        wait_until(lambda: client.engine.load().running == 0)
        client.engine.check_health()
