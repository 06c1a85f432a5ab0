"""What stands before Ray's proxy; tests/e2e/test_edge.py has it before the real one."""

from __future__ import annotations

import pytest
from ray.serve._private.http_util import RequestIdMiddleware, validate_http_proxy_callback_return
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from serving import front
from tests.unit.serving.answers import error_of


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
    }
    assert client.get("/", headers=headers).headers["x-request-id"] == "7"
    assert {name.decode(): value.decode() for name, value in seen} == {"host": "testserver", **headers}


@pytest.mark.parametrize("kind", [PlainTextResponse, Response])
@pytest.mark.parametrize("status", [404, 408, 500, 503])
def test_rays_own_errors_have_openais_shape(status, kind):
    client, _ = behind(kind("Ray says SECRET", status))
    response = client.get("/")
    error = error_of(response, status)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert "SECRET" not in response.text
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)
    assert len(response.headers["x-request-id"]) == 36


def test_rays_advice_when_to_come_again_is_passed_on():
    client, _ = behind(PlainTextResponse("full", 503, {"Retry-After": "7"}))
    assert client.get("/").headers["retry-after"] == "7"


async def failing(scope, receive, send):
    raise RuntimeError("SECRET")


@pytest.mark.parametrize("answer", [None, failing])
def test_no_answer_and_a_failure_are_500_in_openais_shape(answer):
    client, _ = behind(answer)
    response = client.get("/")
    assert error_of(response, 500)["type"] == "server_error"
    assert "SECRET" not in response.text


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
