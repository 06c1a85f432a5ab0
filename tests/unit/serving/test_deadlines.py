"""What a client may take its time for, and what ends without it."""

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
async def test_a_body_that_does_not_end_is_408_and_closes_its_connection(make_service, path):
    app = create_app(make_service(body_timeout_s=0.05))
    slow = await answered(app, path, PROMPT, whole=False)
    assert slow.status == 408
    assert (b"connection", b"close") in slow.sent[0]["headers"]
    error = error_in(slow)
    assert error["code"] == "timeout"
    assert error["message"] == "The body did not arrive within 0.05 seconds."


async def test_whoever_leaves_in_the_middle_of_a_body_is_no_failure_of_the_server(make_service, caplog):
    slow = Browser(create_app(make_service()), "/v1/completions", PROMPT, whole=False)
    await asyncio.sleep(0)
    slow.leave()
    await until(slow.task.done)
    assert slow.status == 499
    assert "request failed" not in caplog.text


async def test_bodies_that_arrive_take_a_bounded_number_of_bytes_and_give_them_back(make_service, monkeypatch):
    monkeypatch.setattr(routes, "ARRIVING_BYTES", 5000)
    half = {"prompt": "a" * 3000}

    app = create_app(make_service(max_body_bytes=4000))
    slow = Browser(app, "/v1/completions", half, whole=False)
    await asyncio.sleep(0)
    refused = await answered(app, "/tokenize", half)
    assert refused.status == 429
    assert (b"retry-after", b"1") in refused.sent[0]["headers"]
    assert "this server takes 5000 at once" in error_in(refused)["message"]
    slow.leave()
    await until(slow.task.done)
    for _ in range(3):
        accepted = await answered(app, "/tokenize", half)
        assert accepted.status == 200


async def test_bodies_that_do_not_end_take_a_bounded_number_of_places_and_leave_them(make_service):
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


@pytest.mark.parametrize(("server", "asked"), [(0.05, None), (None, 0.05), (30.0, 0.05)])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_is_504_and_decoding_ends(make_service, stream, server, asked):
    service = make_service(request_timeout_s=server)
    service.script = lambda request: None
    late = await answered(
        create_app(service), "/v1/completions", {**PROMPT, "n": 2, "stream": stream, "timeout": asked}
    )
    assert late.status == 504
    error = error_in(late)
    assert (error["type"], error["code"]) == ("server_error", "timeout")
    assert error["message"] == "The answer took longer than 0.05 seconds."
    assert set(service.cancelled) == {request.id for request in service.submitted}


async def test_a_stream_that_takes_too_long_ends_with_an_error_and_done(service):
    service.script = lambda request: [Update(request.id, (1,), "a")]
    late = await answered(create_app(service), "/v1/chat/completions", {**CHAT, "stream": True, "timeout": 0.05})
    assert late.status == 200
    *_, error, done, end = late.answer.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "timeout"
    assert (done, end) == (b"data: [DONE]", b"")
    assert service.cancelled[0] == service.submitted[0].id


async def test_a_reader_that_blocks_does_not_put_off_the_deadline(service):
    service.script = lambda request: [Update(request.id, (1,), "a")]
    slow = Browser(create_app(service), "/v1/completions", {**PROMPT, "stream": True, "timeout": 0.05})
    slow.unblocked.clear()
    await until(lambda: service.cancelled)
    assert not slow.task.done()
    slow.unblocked.set()
    await until(slow.task.done)


async def test_an_answer_in_time_leaves_no_timer_behind(service):
    done = await answered(create_app(service), "/v1/completions", {**PROMPT, "timeout": 3600})
    assert done.status == 200
    await asyncio.sleep(0.01)
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    assert all(timer.cancelled() for timer in scheduled)
    assert service.cancelled == []


@pytest.mark.parametrize("timeout", [0, -1, 31, "5", True])
def test_a_timeout_is_a_number_of_seconds_and_at_most_the_servers(make_service, timeout):
    client = asking(make_service(request_timeout_s=30.0))
    error = error_of(client.post("/v1/completions", json={**PROMPT, "timeout": timeout}), 400)
    assert error["param"] == "timeout"
    assert timeout != 31 or error["message"] == "'timeout' is 31 and this server's limit is 30 seconds."
    assert client.post("/v1/completions", json={**PROMPT, "timeout": 30}).status_code == 200
