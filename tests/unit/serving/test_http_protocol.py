"""Limits and errors of the HTTP protocol, over real sockets, in the service's proxy and in the servers of a tap."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
import uvicorn
from starlette.responses import PlainTextResponse, StreamingResponse
from uvicorn.config import HTTP_PROTOCOLS

from osd import http_protocol
from osd.http_protocol import MOST_HEAD_BYTES
from osd.tap.app import server_of
from serving.front import middlewares
from serving.http.paths import UNREAD
from serving.metrics.http_counts import COUNTS
from tests.waiting import HANG_SECONDS, background, wait_until


class RecordingApplication:
    """Application that records requests and disconnects."""

    def __init__(self):
        self.started, self.disconnected = [], []
        self._sent = 0

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        self.started.append(path)
        if path == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.disconnected.append(path)
        elif path == "/stream":
            await StreamingResponse(self._forever(), media_type="text/event-stream")(scope, receive, send)
            self.disconnected.append(path)
        else:
            while scope["method"] == "POST" and (await receive()).get("more_body"):
                pass
            await PlainTextResponse("well")(scope, receive, send)

    async def _forever(self):
        while True:
            yield "data: x\n\n"
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def application():
    return RecordingApplication()


def proxy(application):
    """Return a server that is configured as in Ray's proxy."""
    middlewares()
    return uvicorn.Server(uvicorn.Config(application, lifespan="off", log_config=None, ws="none"))


def tap(application):
    """Return a server of the tap, of its metrics or of the dashboard of ``osd learn``."""
    return server_of(application, drain=1)


@pytest.fixture(scope="module", params=[proxy, tap])
def port(application, request):
    with pytest.MonkeyPatch.context() as patch, socket.socket() as listening:
        # Without this, the protocol that a proxy installs in this process would protect the tap too.
        patch.setitem(HTTP_PROTOCOLS, "auto", "uvicorn.protocols.http.auto:AutoHTTPProtocol")
        server = request.param(application)
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def end():
            server.should_exit = server.force_exit = True

        with background(lambda: server.run([listening]), end):
            yield listening.getsockname()[1]


def exchange(port, data):
    """Send ``data`` and return all bytes until the connection closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()


def refusal(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ") for line in lines[1:])
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    return lines[0], json.loads(body)["error"]


CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("data", [
    b"\r\n\r\nnonsense\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"G\xff\xfe / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    CHUNKED + b"zz\r\n",
    CHUNKED + b"fffffffffffffffff\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
])  # fmt: skip
def test_invalid_http_is_400_in_openai_format(port, data):
    status, error = refusal(exchange(port, data))
    assert status == "http/1.1 400 bad request"
    assert error == {
        "message": "The request is not valid HTTP/1.1.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }


@pytest.mark.parametrize("port", [proxy], indirect=True)
def test_requests_refused_unread_are_counted(port):
    before = COUNTS.copy()
    exchange(port, b"nonsense\r\n\r\n")
    exchange(port, b"GET / HTTP/1.1\r\nlong: " + b"x" * MOST_HEAD_BYTES + b"\r\n\r\n")
    assert COUNTS - before == {(UNREAD, 400): 1, (UNREAD, 431): 1}


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"], ids=["first", "next"])
def test_incomplete_head_is_408_and_slow_body_is_accepted(port, before, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(1000).endswith(b"well")
        connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n")
        status, error = refusal(connection.makefile("rb").read())
    assert status == "http/1.1 408 request timeout"
    assert error["code"] == "timeout"
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n")
        time.sleep(0.4)
        connection.sendall(b"a")
        assert connection.recv(1000).endswith(b"well")
    assert exchange(port, b"") == b"", "an idle connection is closed without a response"


def test_error_response_to_head_has_no_body(port):
    head, _, body = exchange(port, b"HEAD / HTTP/1.1\r\nno colon\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert body == b""


GET = b"GET / HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize("data", [
    GET + b"x: " + b"a" * MOST_HEAD_BYTES + b"\r\n\r\n",
    GET + b"x: a\r\n" * MOST_HEAD_BYTES,
    b"GET /" + b"a" * 2 * MOST_HEAD_BYTES,
    CHUNKED + b"0\r\n" + b"x: a\r\n" * MOST_HEAD_BYTES,
    CHUNKED + b"1;" + b"a" * 8 * MOST_HEAD_BYTES,
])  # fmt: skip
def test_endless_headers_are_431(port, data):
    try:
        status, error = refusal(exchange(port, data))
    except ConnectionError:  # the server closed before reading all data
        return
    assert status == "http/1.1 431 request header fields too large"
    assert error["code"] == "request_too_large"


def test_connection_serves_several_requests(port):
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
        for _ in range(3):
            connection.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n" + b"a" * 100_000)
            assert connection.recv(1000).endswith(b"well")


def test_pipelined_requests_get_one_answer_and_a_close(port, application):
    application.started.clear()
    answer = exchange(port, (GET + b"\r\n") * 500)
    assert answer.endswith(b"well")
    assert b"connection: close" in answer
    assert application.started == ["/"]


def test_disconnect_after_pipelining_ends_the_running_request(port, application):
    application.disconnected.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n" + GET + b"\r\n")
    wait_until(lambda: "/wait" in application.disconnected)


def test_started_response_contains_no_error_response(port, application):
    application.disconnected.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
        connection.sendall(b"POST /stream HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        answer = connection.recv(1000)
        connection.sendall(b"nonsense")
        while data := connection.recv(1000):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1
    wait_until(lambda: "/stream" in application.disconnected)
