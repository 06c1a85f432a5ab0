"""Time limit for a silent replica, with the middleware of both sides."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from starlette.responses import JSONResponse

from serving import front
from serving.http import liveness
from serving.http.liveness import SignsOfLife
from tests.unit.serving.browser import Browser, answered, until
from tests.waiting import HANG_SECONDS


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(liveness, "SIGN_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", 1.0)


async def ask(app):
    """Send a request to an application behind the middleware of the proxy; return the messages to the client."""
    return (await answered(front.Front(app), "/tokenize", {})).sent


async def slow(scope, receive, send):
    await asyncio.sleep(1.6)  # longer than the limit
    await JSONResponse({"slow": True})(scope, receive, send)


def swallowing(app):
    """Return an application that ends quietly when it is cancelled, as Ray's proxy does."""

    async def quiet(scope, receive, send):
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            await send({"type": "http.response.start", "status": 499, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return quiet


async def test_messages_after_the_limit_are_dropped_quietly():
    finished = []

    async def late(scope, receive, send):
        await swallowing(slow)(scope, receive, send)
        finished.append(True)

    start, _ = await ask(late)
    assert (start["status"], finished) == (503, [True])


@pytest.mark.parametrize("wrap", [swallowing, lambda app: app])
async def test_silence_before_the_answer_is_503(wrap):
    start, body = await ask(wrap(slow))
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert "nothing from a replica" in json.loads(body["body"])["error"]["message"]


async def test_silence_within_a_stream_ends_it_with_an_error():
    async def stops(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(HANG_SECONDS)

    body = b"".join(message.get("body", b"") for message in await ask(swallowing(stops)))
    first, error, done, rest = body.split(b"\n\n")
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")
    assert b"nothing from a replica" in error


async def test_signs_of_life_keep_a_slow_answer_and_stay_inside():
    sent = await ask(SignsOfLife(slow))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert json.loads(sent[1]["body"]) == {"slow": True}


async def test_slow_client_is_not_silence():
    client = Browser(front.Front(JSONResponse({})), "/tokenize", {})
    client.unblocked.clear()
    await asyncio.sleep(1.2)
    client.unblocked.set()
    await until(client.task.done)
    assert (client.status, client.answer) == (200, b"{}")


async def test_signs_of_life_end_with_the_request():
    messages = []

    async def send(message):
        messages.append(message)

    async def brief(scope, receive, send):
        await asyncio.sleep(0.3)

    before = asyncio.all_tasks()
    await SignsOfLife(brief)({"type": "http"}, None, send)
    await asyncio.sleep(0.1)
    assert asyncio.all_tasks() == before
    assert len(messages) >= 2
    assert all(message == following for message, following in pairwise(messages))


async def test_timeout_of_the_application_is_a_failure():
    async def fails(scope, receive, send):
        raise TimeoutError

    start, _ = await ask(fails)
    assert start["status"] == 500
