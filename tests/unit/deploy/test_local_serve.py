"""What a start and a stop wait for; Ray and the replicas are stand-ins that answer at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from deploy import local_serve
from deploy.assembly import RayDied
from deploy.local_serve import LocalServe
from osd.config import Settings
from serving.app import CLOSE_SECONDS


class CallingAtOnce:
    """Stands in for ``LocalRay``."""

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
    """Stands in for a handle: what each replica says, or what keeps all from being asked."""

    def __init__(self, *said):
        self.said = said

    def broadcast(self, method):
        assert method == "drain"
        assert asyncio.get_running_loop().is_running(), "Serve may route on the caller's event loop"
        return self

    def results(self, *, timeout_s, return_exceptions):
        assert return_exceptions
        self.seconds = timeout_s
        if isinstance(self.said[0], Exception) and len(self.said) == 1:
            raise self.said[0]
        return list(self.said)


class FailingToStart(CallingAtOnce):
    """The same of a Ray on which nothing else starts."""

    def begin(self, function, *arguments):
        started = Future()
        started.set_exception(RuntimeError("no room for a proxy"))
        return started


@pytest.fixture
def running(monkeypatch):
    """Start Serve with replicas."""

    def start(ray, replicas, **settings) -> LocalServe:
        monkeypatch.setattr("ray.serve.start", lambda **options: None)
        monkeypatch.setattr("ray.serve.run", lambda application, **options: replicas)
        monkeypatch.setattr("serving.app.build", lambda settings, redis_url: None)
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


def test_it_says_how_long_requests_may_go_on_and_that_all_have_ended(drain, caplog):
    assert drain(Replicas(0, 0)) == [
        "waiting for requests in flight, at most 30 seconds",
        "drained after 0 seconds",
    ]
    assert caplog.text == ""


def test_it_says_how_many_requests_ended_with_an_error(drain, caplog):
    assert drain(Replicas(2, 0, 3))[-1] == "drained after 0 seconds, 5 requests ended with an error"


def test_a_replica_that_died_or_hangs_does_not_hide_the_others(drain, caplog):
    assert drain(Replicas(RayActorError(), 1, TimeoutError("too late")))[-1].endswith("1 request ended with an error")
    assert caplog.text.count("a replica could not be drained") == 2
    assert "too late" in caplog.text


@pytest.mark.parametrize("error", [TimeoutError("too late"), RayServeException("no replicas")])
def test_replicas_that_cannot_be_asked_keep_nobody_from_ending(drain, error, caplog):
    assert len(drain(Replicas(error))) == 1
    assert f"the replicas cannot be drained: {error}" in caplog.text


def test_a_ray_that_died_was_told_of_already(drain, caplog):
    assert len(drain(Replicas(RayDied("Ray's GCS died")))) == 1
    assert caplog.text == ""


@pytest.mark.parametrize(("said", "seconds"), [(0, CLOSE_SECONDS), (TimeoutError("too late"), 4)])
def test_one_that_hangs_is_not_waited_for_as_long(running, said, seconds, monkeypatch):
    monkeypatch.setattr(local_serve, "_delete_application", lambda: None)
    serve = running(ray := CallingAtOnce(), Replicas(0, said))
    serve.drain(lambda step: None)
    serve.end()
    assert ray.seconds == seconds


def test_a_serve_that_cannot_start_says_so_and_is_not_waited_for():
    with pytest.raises(RuntimeError, match="no room for a proxy"):
        LocalServe(FailingToStart(), Settings()).start()
