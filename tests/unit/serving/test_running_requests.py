"""Shutdown of a replica: it refuses new requests, and running requests finish within a time limit."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from serving.api.routes import create_app
from serving.http.running_requests import RunningRequests
from tests.unit.serving.browser import Browser, answered, until

PROMPT = {"prompt": "hi"}
SOON, LATE = 0.1, 30


@pytest.fixture
def work() -> RunningRequests:
    return RunningRequests()


@pytest.fixture
def app(service, work):
    app = create_app(service)
    app.add_middleware(work.guard)
    return app


def is_stopping_error(browser) -> bool:
    """Return whether the response is the error of a server that shuts down."""
    headers = dict(browser.sent[0]["headers"])
    error = json.loads(browser.answer)["error"]
    matches = error["message"] == "The server is stopping." and error["type"] == "server_error"
    return matches and browser.status == 503 and b"retry-after" in headers


async def test_drain_returns_at_once_without_requests(work):
    assert await work.drain(math.inf) == 0


@pytest.mark.parametrize(("path", "method"), [
    ("/v1/chat/completions", "POST"), ("/v1/completions", "POST"), ("/tokenize", "POST"), ("/detokenize", "POST"),
    ("/health", "GET"),
])  # fmt: skip
async def test_new_requests_and_health_are_503_after_drain(app, work, service, path, method):
    await work.drain(LATE)
    assert is_stopping_error(await answered(app, path, PROMPT, method=method))
    assert service.submitted == []


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/dashboard"])
async def test_read_only_paths_answer_after_drain(app, work, path):
    await work.drain(LATE)
    assert (await answered(app, path, {}, method="GET")).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_drain_waits_for_running_requests(app, work, service, stream):
    service.script = lambda request: None
    running = Browser(app, "/v1/completions", {**PROMPT, "stream": stream})
    await until(lambda: service.submitted)
    drained = asyncio.ensure_future(work.drain(LATE))
    await asyncio.sleep(0.05)
    assert not drained.done()
    service.updates[0](Update(service.submitted[0].id, (1,), "a", "stop", SpeculationCounts()))
    assert await drained == 0
    assert running.task.done()
    assert running.status == 200
    assert b"error" not in running.answer
    assert running.sent[-1].get("more_body", False) is False


async def test_stream_over_the_drain_limit_ends_with_error_event(app, work, service):
    service.script = lambda request: [Update(request.id, (1,), "a")]
    running = Browser(app, "/v1/completions", {**PROMPT, "n": 2, "stream": True})
    await until(lambda: running.answer.count(b"data: ") == 2)
    assert await work.drain(SOON) == 1
    assert running.status == 200
    *whole, error, done, rest = running.answer.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "The server is stopping."
    assert len(whole) == 2
    assert set(service.cancelled) == {request.id for request in service.submitted}
    assert running.sent[-1]["more_body"] is False


@pytest.mark.parametrize("whole", [True, False])
async def test_unanswered_request_over_the_drain_limit_gets_503(app, work, service, whole):
    service.script = lambda request: None
    running = Browser(app, "/v1/completions", PROMPT, whole=whole)
    await asyncio.sleep(0.05)
    assert await work.drain(SOON) == 1
    assert is_stopping_error(running)
    assert service.cancelled == [request.id for request in service.submitted]


async def test_second_drain_waits_for_a_blocked_reader(app, work, service):
    service.script = lambda request: [Update(request.id, (1,), "a")]
    stuck = Browser(app, "/v1/completions", {**PROMPT, "stream": True})
    stuck.unblocked.clear()
    await until(lambda: stuck.sent)
    drains = [asyncio.ensure_future(work.drain(SOON))]
    await until(lambda: service.cancelled)
    drains.append(asyncio.ensure_future(work.drain(0)))
    await asyncio.sleep(0.05)
    assert not any(drain.done() for drain in drains)
    stuck.unblocked.set()
    assert await asyncio.gather(*drains) == [1, 0]


async def test_timeout_error_of_the_application_is_raised(work):
    async def failing(scope, receive, send):
        raise TimeoutError("of the application")

    failed = Browser(work.guard(failing), "/v1/completions", PROMPT)
    with pytest.raises(TimeoutError, match="of the application"):
        await failed.task
    assert failed.sent == []
    assert await work.drain(LATE) == 0
