"""Time limits of bodies and answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from osd.engine.request import Update
from serving.api import routes
from serving.api.routes import create_app
from tests.unit.serving.answers import CHAT, asking, error_of
from tests.unit.serving.browser import Browser, answered, until

PROMPT = {"prompt": "hi"}


def error_in(browser):
    return json.loads(browser.answer)["error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_endless_body_is_408_and_closes_the_connection(make_service, path):
    app = create_app(make_service(body_timeout_s=0.05))
    slow = await answered(app, path, PROMPT, whole=False)
    assert slow.status == 408
    assert (b"connection", b"close") in slow.sent[0]["headers"]
    error = error_in(slow)
    assert error["code"] == "timeout"
    assert error["message"] == "The body did not arrive within 0.05 seconds."


async def test_disconnect_during_the_body_logs_no_failure(make_service, caplog):
    slow = Browser(create_app(make_service()), "/v1/completions", PROMPT, whole=False)
    await asyncio.sleep(0)
    slow.leave()
    await until(slow.task.done)
    assert slow.status == 499
    assert "request failed" not in caplog.text


async def test_arriving_bodies_share_a_limit_of_bytes(make_service, monkeypatch):
    monkeypatch.setattr(routes, "ARRIVING_BYTES", 5000)
    half = {"prompt": "a" * 3000}

    app = create_app(make_service(max_body_bytes=4000))
    slow = Browser(app, "/v1/completions", half, whole=False)
    await asyncio.sleep(0)
    refused = await answered(app, "/tokenize", half)
    assert refused.status == 429
    assert (b"retry-after", b"1") in refused.sent[0]["headers"]
    assert "this server's limit is 5000" in error_in(refused)["message"]
    slow.leave()
    await until(slow.task.done)
    for _ in range(3):
        accepted = await answered(app, "/tokenize", half)
        assert accepted.status == 200


async def test_arriving_bodies_share_a_limit_of_requests(make_service):
    service = make_service(max_queue=2, body_timeout_s=30)
    app = create_app(service)
    slow = [Browser(app, path, PROMPT, whole=False) for path in ("/v1/completions", "/tokenize")]
    await asyncio.sleep(0)
    refused = await answered(app, "/v1/completions", PROMPT)
    assert refused.status == 429
    assert (b"retry-after", b"1") in refused.sent[0]["headers"]
    assert error_in(refused)["code"] == "queue_full"
    health = await answered(app, "/v1/models/tiny", {}, method="GET")
    assert health.status == 200
    slow[0].leave()
    await until(slow[0].task.done)
    accepted = await answered(app, "/v1/completions", PROMPT)
    assert accepted.status == 200
    slow[1].leave()
    await until(slow[1].task.done)


@pytest.mark.parametrize(("server", "requested"), [(0.05, None), (None, 0.05), (30.0, 0.05)])
@pytest.mark.parametrize("stream", [False, True])
async def test_answer_over_the_time_limit_is_504_and_cancelled(make_service, stream, server, requested):
    service = make_service(request_timeout_s=server)
    service.script = lambda request: None
    late = await answered(
        create_app(service), "/v1/completions", {**PROMPT, "n": 2, "stream": stream, "timeout": requested}
    )
    assert late.status == 504
    error = error_in(late)
    assert (error["type"], error["code"]) == ("server_error", "timeout")
    assert error["message"] == "The answer took longer than 0.05 seconds."
    assert set(service.cancelled) == {request.id for request in service.submitted}


async def test_stream_over_the_time_limit_ends_with_error_and_done(service):
    service.script = lambda request: [Update(request.id, (1,), "a")]
    late = await answered(create_app(service), "/v1/chat/completions", {**CHAT, "stream": True, "timeout": 0.05})
    assert late.status == 200
    *_, error, done, end = late.answer.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "timeout"
    assert (done, end) == (b"data: [DONE]", b"")
    assert service.cancelled[0] == service.submitted[0].id


async def test_answer_within_the_time_limit_leaves_no_timer(service):
    done = await answered(create_app(service), "/v1/completions", {**PROMPT, "timeout": 3600})
    assert done.status == 200
    await asyncio.sleep(0.01)
    scheduled = asyncio.get_running_loop()._scheduled
    assert all(timer.cancelled() for timer in scheduled)
    assert service.cancelled == []


@pytest.mark.parametrize("timeout", [0, -1, 31, "5", True])
def test_invalid_timeout_is_400(make_service, timeout):
    client = asking(make_service(request_timeout_s=30.0))
    error = error_of(client.post("/v1/completions", json={**PROMPT, "timeout": timeout}), 400)
    assert error["param"] == "timeout"
    assert timeout != 31 or error["message"] == "'timeout' is 31 and this server's limit is 30 seconds."
    assert client.post("/v1/completions", json={**PROMPT, "timeout": 30}).status_code == 200
