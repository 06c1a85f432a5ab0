"""Middleware around Ray's proxy; tests/e2e/test_edge.py tests it with a real proxy."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import pytest
from ray.serve._private.http_util import RequestIdMiddleware, validate_http_proxy_callback_return
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from serving import front
from serving.http import affinity
from serving.http.affinity import Affinity
from serving.http.carried_body import CarriedBody, ClientMessages
from tests.unit.serving.answers import error_of
from tests.waiting import HANG_SECONDS


def proxied(answer):
    """Return a client of an application in place of Ray's proxy, and the list of headers that it receives."""
    seen = []

    async def app(scope, receive, send):
        seen.extend(scope["headers"])
        if answer is not None:
            await answer(scope, receive, send)

    (middleware,) = validate_http_proxy_callback_return(front.middlewares())
    return TestClient(middleware.cls(RequestIdMiddleware(app)), raise_server_exceptions=False), seen


@pytest.mark.parametrize("header", [
    (b"serve_multiplexed_model_id", b"a"),
    (b"serve-multiplexed-model-id", b"\xff"),
    (b"x-session-id", b"a"),
    (b"x-request-timeout-seconds", b"0.0001"),
    (b"x-request-disconnect-disabled", b"?1"),
    (b"x-request-disconnect-disabled", b"\xff"),
    (b"traceparent", b"\xff"),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01, and a text"),
    (b"tracestate", b"a=some text"),
    (b"x-request-id", b"\xff"),
    (b"x-request-id", b"a b"),
    (b"x-request-id", b"x" * 129),
])  # fmt: skip
def test_headers_that_control_ray_are_not_forwarded(header):
    client, seen = proxied(JSONResponse({}))
    response = client.get("/", headers=[header])
    assert response.status_code == 200
    assert header not in seen
    assert len(response.headers["x-request-id"]) == 36  # Ray generated it


def test_headers_of_the_service_are_forwarded():
    client, seen = proxied(JSONResponse({}))
    headers = {
        "authorization": "Bearer k", "content-type": "application/json", "origin": "http://a", "x-request-id": "7",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }  # fmt: skip
    assert client.get("/", headers=headers).headers["x-request-id"] == "7"
    assert {name.decode(): value.decode() for name, value in seen} == {"host": "testserver", **headers}


@pytest.mark.parametrize("kind", [PlainTextResponse, Response])
@pytest.mark.parametrize("status", [408, 500, 503])
def test_errors_of_ray_are_converted_to_openai_errors(status, kind):
    client, _ = proxied(kind("Ray says SECRET", status))
    response = client.get("/")
    error = error_of(response, status)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert "SECRET" not in response.text
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)
    assert len(response.headers["x-request-id"]) == 36


def test_missing_application_is_503():
    client, _ = proxied(PlainTextResponse("Path '/' not found. Ping http://.../-/routes for available routes.", 404))
    response = client.get("/")
    assert error_of(response, 503)["type"] == "server_error"
    assert response.headers["retry-after"] == "1"


def test_retry_after_header_of_ray_is_forwarded():
    client, _ = proxied(PlainTextResponse("full", 503, {"Retry-After": "7"}))
    assert client.get("/").headers["retry-after"] == "7"


async def failing(scope, receive, send):
    raise RuntimeError("SECRET")


def broken(*chunks, kind="text/event-stream", error=None):
    """Return an application that ends within the body, as Ray's proxy does if the replica dies or the proxy fails."""

    async def app(scope, receive, send):
        headers = [(b"content-type", kind.encode()), (b"content-length", b"100")][: 1 + (kind == "application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if error is not None:
            raise error

    return app


def test_failure_of_the_proxy_is_an_openai_error():
    client, _ = proxied(failing)
    response = client.get("/")
    assert error_of(response, 500)["type"] == "server_error"
    assert "SECRET" not in response.text


@pytest.mark.parametrize("answer", [None, broken(), broken(kind="application/json")])
def test_replica_death_before_the_answer_is_503(answer):
    client, _ = proxied(answer)
    response = client.get("/")
    assert error_of(response, 503)["type"] == "server_error"
    assert response.headers["retry-after"] == "1"


async def test_disconnect_before_the_answer_counts_as_499():
    sent = []

    async def app(scope, receive, send):
        await receive()

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await front.Front(app)({"type": "http", "path": "/health", "headers": []}, receive, send)
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(
    ("chunks", "gap"),
    [([b"data: 1\n\n"], b""), ([b"data: 1\n\n", b"data: 2\n\n", b""], b""), ([b"data: 1\n\n", b"data: {"], b"\n\n")],
)
@pytest.mark.parametrize("error", [None, RuntimeError("SECRET")])
def test_broken_stream_ends_with_error_event_and_done(chunks, gap, error):
    client, _ = proxied(broken(*chunks, error=error))
    response = client.get("/")
    assert response.status_code == 200
    sent = b"".join(chunks) + gap
    assert response.content.startswith(sent)
    event, done, rest = response.content[len(sent) :].decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "SECRET" not in event


def test_broken_json_body_is_not_extended():
    client, _ = proxied(broken(b'{"a": ', kind="application/json"))
    assert client.get("/").content == b'{"a": '


@pytest.mark.parametrize("answer", [
    PlainTextResponse("metrics"),
    JSONResponse({"error": 1}, 503),
    Response("page", 401, media_type="text/html"),
    Response("data: [DONE]\n\n", media_type="text/event-stream"),
])  # fmt: skip
def test_answers_of_the_service_are_not_changed(answer):
    client, _ = proxied(answer)
    response = client.get("/")
    assert (response.status_code, response.content) == (answer.status_code, answer.body)


def test_websocket_is_closed():
    client, seen = proxied(failing)
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/"):
        pass
    assert seen == []


class Client:
    """Client that sends a body in parts of (delay in seconds, bytes); None disconnects, and an error is raised."""

    def __init__(self, *parts):
        self._parts = list(parts)

    async def __call__(self):
        if not self._parts:
            await asyncio.sleep(60)
        delay, part = self._parts.pop(0)
        if delay:
            await asyncio.sleep(delay)
        if isinstance(part, Exception):
            raise part
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}


def forwarded(*parts, path="/v1/completions", headers=(), reads=True):
    """Return the parts of a request that the application receives: affinity, body, its transport, and a disconnect."""
    got = {}

    async def app(scope, receive, send):
        got["affinity"] = dict(scope["headers"]).get(affinity.HEADER)
        body, more = b"", reads
        while more and (message := await receive())["type"] == "http.request":
            body, more = body + message["body"], message["more_body"]
        got["body"], got["disconnected"] = body, reads and message["type"] == "http.disconnect"
        await JSONResponse({})(scope, receive, send)

    async def proxy(scope, receive, send):
        got["carried"] = scope["extensions"] != {"other": {}}
        await CarriedBody(app)(scope, receive, send)

    async def send(message):
        got.setdefault("status", message.get("status"))

    async def main():
        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "extensions": {"other": {}}}
        before = asyncio.all_tasks()
        await asyncio.wait_for(front.Front(proxy)(scope, Client(*parts), send), HANG_SECONDS)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    asyncio.run(main())
    return got


def answered(body=None, affinity=None, carried=False, disconnected=False):
    """Return the result of ``forwarded`` for an answered request."""
    return {
        "affinity": affinity, "body": body or BODY, "carried": carried, "disconnected": disconnected, "status": 200
    }  # fmt: skip


BODY = json.dumps({"prompt": "p" * 500}).encode()
AFFINITY = str(Affinity.of(BODY, b"")).encode()


def test_prompt_affinity_and_body_are_forwarded():
    assert forwarded((0, BODY)) == answered(affinity=AFFINITY, carried=True)
    assert forwarded((0, BODY[:5]), (0.01, BODY[5:200]), (0, BODY[200:])) == answered(affinity=AFFINITY)


def test_parts_of_a_body_are_joined_until_a_client_pauses():
    async def messages():
        client = ClientMessages(Client(*[(0, bytes([byte])) for byte in BODY], (2, b"late")))
        with closing(client):
            return await client.receive(), await client.receive()

    first, second = asyncio.run(messages())
    assert first == {"type": "http.request", "body": BODY, "more_body": True}
    assert second == {"type": "http.request", "body": b"late", "more_body": False}


def test_affinity_depends_on_the_key_and_not_on_a_header():
    key = (b"authorization", b"Bearer k")
    got = forwarded((0, BODY), headers=[(b"x-session-id", b"a"), key])
    assert got["affinity"] == str(Affinity.of(BODY, b"Bearer k")).encode() != AFFINITY


def test_late_or_large_body_is_forwarded_without_affinity():
    assert forwarded((0, BODY[:9]), (0.5, BODY[9:])) == answered()
    large = b"x" * (1 << 20)
    assert forwarded((0, large), (0, b"y"), (0, b"z")) == answered(large + b"yz")


@pytest.mark.parametrize(
    "header", [(b"content-length", b"99999999"), (b"content-length", b"?"), (b"expect", b"100-continue")]
)
def test_body_is_not_read_for_large_or_expect_requests(header):
    assert forwarded((0, BODY), headers=[header])["affinity"] is None


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
@pytest.mark.parametrize("length", [b"0" * 5000 + b"9", b"9" * 5000])
def test_length_of_many_digits_is_no_error(path, length):
    assert forwarded((0, BODY), path=path, headers=[(b"content-length", length)])["status"] == 200


def test_other_paths_have_no_affinity_but_carry_the_body():
    assert forwarded((0, BODY), path="/tokenize") == answered(carried=True)
    assert forwarded((0.1, BODY), path="/tokenize") == answered()
    assert forwarded((0.1, BODY), path="/tokenize", reads=False)["status"] == 200


def test_disconnect_during_the_body_is_forwarded():
    assert forwarded((0, BODY[:9]), (0, None)) == answered(BODY[:9], disconnected=True)
    assert forwarded((0, None), path="/tokenize")["disconnected"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_carried_body_is_received_once(path):
    messages, received = [{"type": "http.request", "body": BODY}, {"type": "http.disconnect"}], []

    async def receive():
        return messages.pop(0)

    async def app(scope, receive, send):
        received.extend([await receive(), await receive()])

    async def send(message):
        pass

    await front.Front(CarriedBody(app))({"type": "http", "path": path, "headers": []}, receive, send)
    assert [message.get("body") for message in received] == [BODY, None]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_connection_error_is_500(path):
    assert forwarded((0, RuntimeError("connection lost")), path=path)["status"] == 500
