"""What stands before Ray's proxy; tests/e2e/test_edge.py has it before the real one."""

from __future__ import annotations

import asyncio
import json

import pytest
from ray.serve._private.http_util import RequestIdMiddleware, validate_http_proxy_callback_return
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from serving import front
from serving.http import affinity
from serving.http.affinity import Affinity
from serving.http.carried_body import CarriedBody
from tests.unit.serving.answers import error_of
from tests.waiting import HANG_SECONDS


def behind(answer):
    """A client of an application that stands where Ray's proxy does, and the headers that came through to it."""
    seen = []

    async def app(scope, receive, send):
        seen.extend(scope["headers"])
        if answer is not None:
            await answer(scope, receive, send)

    (middleware,) = validate_http_proxy_callback_return(front.middlewares())
    return TestClient(middleware.cls(RequestIdMiddleware(app)), raise_server_exceptions=False), seen


@pytest.mark.parametrize(
    "header",
    [
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
    ],
)
def test_what_ray_would_act_on_does_not_come_through(header):
    client, seen = behind(JSONResponse({}))
    response = client.get("/", headers=[header])
    assert response.status_code == 200
    assert header not in seen
    assert len(response.headers["x-request-id"]) == 36  # one of Ray's own


def test_what_the_service_reads_comes_through():
    client, seen = behind(JSONResponse({}))
    headers = {
        "authorization": "Bearer k",
        "content-type": "application/json",
        "origin": "http://a",
        "x-request-id": "7",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    assert client.get("/", headers=headers).headers["x-request-id"] == "7"
    assert {name.decode(): value.decode() for name, value in seen} == {"host": "testserver", **headers}


@pytest.mark.parametrize("kind", [PlainTextResponse, Response])
@pytest.mark.parametrize("status", [408, 500, 503])
def test_rays_own_errors_have_openais_shape(status, kind):
    client, _ = behind(kind("Ray says SECRET", status))
    response = client.get("/")
    error = error_of(response, status)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert "SECRET" not in response.text
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)
    assert len(response.headers["x-request-id"]) == 36


def test_where_ray_knows_of_no_application_it_has_not_come_yet_or_has_gone():
    client, _ = behind(PlainTextResponse("Path '/' not found. Ping http://.../-/routes for available routes.", 404))
    response = client.get("/")
    assert error_of(response, 503)["type"] == "server_error"
    assert response.headers["retry-after"] == "1"


def test_rays_advice_when_to_come_again_is_passed_on():
    client, _ = behind(PlainTextResponse("full", 503, {"Retry-After": "7"}))
    assert client.get("/").headers["retry-after"] == "7"


async def failing(scope, receive, send):
    raise RuntimeError("SECRET")


def breaking_off(*chunks, kind="text/event-stream", error=None):
    """An answer that ends after some of its body, as Ray's proxy has it where the replica dies, or fails itself."""

    async def app(scope, receive, send):
        headers = [(b"content-type", kind.encode()), (b"content-length", b"100")][: 1 + (kind == "application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if error is not None:
            raise error

    return app


def test_a_proxy_that_fails_answers_500_in_openais_shape():
    client, _ = behind(failing)
    response = client.get("/")
    assert error_of(response, 500)["type"] == "server_error"
    assert "SECRET" not in response.text


@pytest.mark.parametrize("answer", [None, breaking_off(), breaking_off(kind="application/json")])
def test_a_replica_that_dies_before_it_answers_is_503_whatever_it_was_about_to_answer(answer):
    client, _ = behind(answer)
    response = client.get("/")
    assert error_of(response, 503)["type"] == "server_error"
    assert response.headers["retry-after"] == "1"


async def test_a_client_that_left_before_its_answer_is_counted_as_no_failure():
    sent = []

    async def app(scope, receive, send):
        await receive()

    async def left():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await front.Front(app)({"type": "http", "path": "/health", "headers": []}, left, send)
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(
    ("chunks", "gap"),
    [([b"data: 1\n\n"], b""), ([b"data: 1\n\n", b"data: 2\n\n", b""], b""), ([b"data: 1\n\n", b"data: {"], b"\n\n")],
)
@pytest.mark.parametrize("error", [None, RuntimeError("SECRET")])
def test_a_stream_that_breaks_off_ends_with_an_event_that_says_so_and_the_last_one(chunks, gap, error):
    client, _ = behind(breaking_off(*chunks, error=error))
    response = client.get("/")
    assert response.status_code == 200
    sent = b"".join(chunks) + gap
    assert response.content.startswith(sent)
    event, done, rest = response.content[len(sent) :].decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "SECRET" not in event


def test_a_stream_that_has_ended_gets_no_more_events():
    client, _ = behind(Response("data: [DONE]\n\n", media_type="text/event-stream"))
    assert client.get("/").text == "data: [DONE]\n\n"


def test_nothing_is_put_into_another_body_that_breaks_off():
    client, _ = behind(breaking_off(b'{"a": ', kind="application/json"))
    assert client.get("/").content == b'{"a": '


@pytest.mark.parametrize(
    "answer",
    [PlainTextResponse("metrics"), JSONResponse({"error": 1}, 503), Response("page", 401, media_type="text/html")],
)
def test_the_services_own_answers_are_left_alone(answer):
    client, _ = behind(answer)
    response = client.get("/")
    assert (response.status_code, response.content) == (answer.status_code, answer.body)


def test_there_are_no_websockets():
    client, seen = behind(failing)
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/"):
        pass
    assert seen == []


class Client:
    """Sends a body in parts, each after so many seconds, and then leaves; a part may be an error."""

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


def passed_on(*parts, path="/v1/completions", headers=(), reads=True):
    """The affinity and the body that come through, how it comes, and whether the client has left."""
    got = {}

    async def app(scope, receive, send):
        got["affinity"] = dict(scope["headers"]).get(affinity.HEADER)
        body, more = b"", reads
        while more and (message := await receive())["type"] == "http.request":
            body, more = body + message["body"], message["more_body"]
        got["body"], got["left"] = body, reads and message["type"] == "http.disconnect"
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


def came(body=None, affinity=None, carried=False, left=False):
    """What comes through of a request that is answered."""
    return {"affinity": affinity, "body": body or BODY, "carried": carried, "left": left, "status": 200}


BODY = json.dumps({"prompt": "p" * 500}).encode()
SAID = str(Affinity.of(BODY, b"")).encode()


def test_the_router_is_told_how_a_prompt_begins_and_the_body_comes_through_whole():
    assert passed_on((0, BODY)) == came(affinity=SAID, carried=True)
    assert passed_on((0, BODY[:5]), (0.01, BODY[5:200]), (0, BODY[200:])) == came(affinity=SAID)


def test_a_client_cannot_say_it_and_each_key_has_its_own():
    key = (b"authorization", b"Bearer k")
    got = passed_on((0, BODY), headers=[(b"x-session-id", b"a"), key])
    assert got["affinity"] == str(Affinity.of(BODY, b"Bearer k")).encode() != SAID


def test_a_body_that_comes_late_or_is_large_is_not_waited_for_and_comes_through_whole():
    assert passed_on((0, BODY[:9]), (0.5, BODY[9:])) == came()
    large = b"x" * (1 << 20)
    assert passed_on((0, large), (0, b"y"), (0, b"z")) == came(large + b"yz")


@pytest.mark.parametrize(
    "header", [(b"content-length", b"99999999"), (b"content-length", b"?"), (b"expect", b"100-continue")]
)
def test_who_may_be_refused_first_is_not_asked_for_the_body(header):
    assert passed_on((0, BODY), headers=[header])["affinity"] is None


def test_of_other_requests_nothing_is_told_and_the_body_is_carried_where_it_is_there():
    assert passed_on((0, BODY), path="/tokenize") == came(carried=True)
    assert passed_on((0.1, BODY), path="/tokenize") == came()
    assert passed_on((0.1, BODY), path="/tokenize", reads=False)["status"] == 200


def test_a_client_that_leaves_while_its_body_comes_has_left():
    assert passed_on((0, BODY[:9]), (0, None)) == came(BODY[:9], left=True)
    assert passed_on((0, None), path="/tokenize")["left"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_a_body_that_is_carried_does_not_come_again(path):
    came, received = [{"type": "http.request", "body": BODY}, {"type": "http.disconnect"}], []

    async def receive():
        return came.pop(0)

    async def app(scope, receive, send):
        received.extend([await receive(), await receive()])

    async def send(message):
        pass

    await front.Front(CarriedBody(app))({"type": "http", "path": path, "headers": []}, receive, send)
    assert [message.get("body") for message in received] == [BODY, None]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_connection_that_fails_is_an_error_of_the_proxy(path):
    assert passed_on((0, RuntimeError("the connection is gone")), path=path)["status"] == 500
