"""Start and end of Serve, with replacements of Ray and of the replicas that answer at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from deploy import local_serve
from deploy.assembly import RayDied, StartError
from deploy.local_serve import LocalServe
from osd.config import Settings
from serving.app import CLOSE_SECONDS
from tests.waiting import HANG_SECONDS


class CallingAtOnce:
    """Replacement of ``LocalRay`` that calls functions directly."""

    def call(self, doing, seconds, function, *arguments):
        self.seconds = seconds
        return function(*arguments)

    def begin(self, function, *arguments):
        started = Future()
        started.set_result(function(*arguments))
        return started

    def wait(self, doing, future, seconds):
        return future.result()


class Replicas:
    """Replacement of a handle: the result of each replica, or a single error of the whole call."""

    def __init__(self, *results_of_replicas):
        self.results_of_replicas = results_of_replicas

    def broadcast(self, method):
        assert method == "drain"
        assert asyncio.get_running_loop().is_running(), "Serve may route on the caller's event loop"
        return self

    def results(self, *, timeout_s, return_exceptions):
        assert return_exceptions
        self.seconds = timeout_s
        if isinstance(self.results_of_replicas[0], Exception) and len(self.results_of_replicas) == 1:
            raise self.results_of_replicas[0]
        return list(self.results_of_replicas)


class FailingToStart(CallingAtOnce):
    """The same, for a Ray on which the proxy cannot start."""

    def begin(self, function, *arguments):
        started = Future()
        started.set_exception(RuntimeError("no room for a proxy"))
        return started


def states_of(*statuses: str, message: str = ""):
    """Return a replacement of ``serve.status`` for an application that goes through these states."""
    left = list(statuses)

    def status():
        state = left.pop(0) if len(left) > 1 else left[0]
        parts = {"osd": SimpleNamespace(message=message)}
        application = SimpleNamespace(status=state, message="deployment failed", deployments=parts)
        return SimpleNamespace(applications={"osd": application})

    return status


@pytest.fixture
def running(monkeypatch):
    """Return a function that starts Serve with replicas."""

    def build(settings, redis_url, tries) -> None:
        assert tries == 1, "the user of a local start waits for each try"

    def start(ray, replicas, **settings) -> LocalServe:
        monkeypatch.setattr("ray.serve.start", lambda **options: None)
        monkeypatch.setattr("ray.serve.run_many", lambda targets, **options: [replicas])
        monkeypatch.setattr("ray.serve.status", states_of("RUNNING"))
        monkeypatch.setattr("serving.app.build", build)
        serve = LocalServe(ray, Settings(serving=settings))
        serve.start()
        serve.start_replicas("redis://127.0.0.1:1")
        return serve

    return start


@pytest.fixture
def drain(running):
    def drained(replicas) -> list[str]:
        ray, steps = CallingAtOnce(), []
        running(ray, replicas, drain_s=30).drain(steps.append)
        assert 30 < replicas.seconds < ray.seconds < 40
        return steps

    return drained


def test_drain_reports_its_limit_and_its_end(drain, caplog):
    assert drain(Replicas(0, 0)) == ["waiting for requests in flight, at most 30 seconds", "drained after 0 seconds"]
    assert caplog.text == ""


def test_drain_reports_requests_that_ended_with_an_error(drain, caplog):
    assert drain(Replicas(2, 0, 3))[-1] == "drained after 0 seconds, 5 requests ended with an error"


def test_drain_reports_all_replicas_despite_a_failing_one(drain, caplog):
    assert drain(Replicas(RayActorError(), 1, TimeoutError("too late")))[-1].endswith("1 request ended with an error")
    assert caplog.text.count("a replica could not be drained") == 2
    assert "too late" in caplog.text


@pytest.mark.parametrize("error", [TimeoutError("too late"), RayServeException("no replicas")])
def test_drain_of_unreachable_replicas_logs_a_warning(drain, error, caplog):
    assert len(drain(Replicas(error))) == 1
    assert f"the replicas cannot be drained: {error}" in caplog.text


def test_drain_after_the_death_of_ray_logs_nothing(drain, caplog):
    assert len(drain(Replicas(RayDied("Ray's GCS died")))) == 1
    assert caplog.text == ""


@pytest.mark.parametrize(("results_of_replicas", "seconds"), [(0, CLOSE_SECONDS), (TimeoutError("too late"), 4)])
def test_end_waits_less_for_a_hanging_replica(running, results_of_replicas, seconds, monkeypatch):
    monkeypatch.setattr(local_serve, "_delete_application", lambda: None)
    serve = running(ray := CallingAtOnce(), Replicas(0, results_of_replicas))
    serve.drain(lambda step: None)
    serve.end()
    assert ray.seconds == seconds


def test_start_failure_of_serve_is_raised_at_once():
    with pytest.raises(RuntimeError, match="no room for a proxy"):
        LocalServe(FailingToStart(), Settings()).start()


@pytest.mark.parametrize(("message", "kind", "reason"), [
    ("Traceback\n  osd.target.files.TargetError: no weights\n", StartError, "no weights"),
    ("ConfigError: engine.slots is 9", StartError, "engine.slots is 9"),
    ("torch.OutOfMemoryError: no room", RuntimeError, "no room"),
    ("the actor died", RuntimeError, "deployment failed"),
])  # fmt: skip
def test_replica_that_does_not_start_names_its_error(message, kind, reason, running, monkeypatch):
    serve = running(CallingAtOnce(), None)
    monkeypatch.setattr("ray.serve.status", states_of("DEPLOYING", "DEPLOY_FAILED", message=message))
    with pytest.raises(RuntimeError, match=f"^{reason}$") as refused:
        serve.start_replicas("redis://127.0.0.1:1")
    assert type(refused.value) is kind


def test_start_of_replicas_ends_with_the_service(running, monkeypatch):
    serve = running(CallingAtOnce(), None)
    monkeypatch.setattr(local_serve, "_delete_application", lambda: None)
    monkeypatch.setattr("ray.serve.status", states_of("DELETING"))
    start = threading.Thread(target=serve.start_replicas, args=("redis://127.0.0.1:1",))
    start.start()
    serve.end()
    start.join(HANG_SECONDS)
    assert not start.is_alive()
