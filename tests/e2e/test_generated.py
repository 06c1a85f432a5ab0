"""Generated requests to a running service, which answers in OpenAI's format or closes the connection."""

from __future__ import annotations

import http.client
import io
import json
import socket
from collections import Counter

import pytest

from tests.e2e.generated import for_each_request
from tests.waiting import HANG_SECONDS

EXPECTED_ERRORS = {503, 504}
"""Statuses above 499 that are not failures of the service."""


class RecordedSocket:
    """Socket replacement from which ``http.client`` reads a response."""

    def __init__(self, file):
        self.file = file

    def makefile(self, mode):
        return self.file


def answers(service, sent):
    """Send a request and return status, headers and body of every answer on the connection."""
    with socket.create_connection(("127.0.0.1", service.settings.serving.port), timeout=HANG_SECONDS) as connection:
        try:
            connection.sendall(sent.data)
            if sent.end == "leave":
                return []
            if sent.end == "half":
                connection.shutdown(socket.SHUT_WR)
            data = connection.makefile("rb").read()
        except TimeoutError:
            raise
        except OSError:  # the server closed the connection before it read everything
            return []
    file, received = io.BytesIO(data), []
    while file.tell() < len(data):
        response = http.client.HTTPResponse(RecordedSocket(file), method=sent.data.partition(b" ")[0].decode("latin-1"))
        file.close = lambda: None
        response.begin()
        received.append((response.status, response.headers, response.read()))
    return received


def check(status, headers, body, method):
    assert status < 500 or status in EXPECTED_ERRORS, body
    if status == 200 and headers["content-type"].startswith("text/event-stream"):
        late = [line for line in body.split(b"\n\n") if b'"type":"server_error"' in line]
        assert not late or b'"code":"timeout"' in late[0], late
    if status < 400 or method == b"HEAD":
        return
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert status not in (429, 503) or headers["retry-after"]


def flood(service, count):
    """Send ``count`` generated requests; return the number of answers by status, with None for no answer."""
    seen = Counter()

    def send(sent):
        received = answers(service, sent)
        assert received or sent.end != "wait", "no answer"
        for status, headers, body in received:
            seen[status] += 1
            check(status, headers, body, sent.data.partition(b" ")[0])
        if not received:
            seen[None] += 1

    for_each_request(count, send)
    return seen


def expect_as_before(service, eventually):
    """Assert that the service answers, and that every place of both replicas is free."""
    assert service.http.get("/health").json() == {"status": "ok"}
    eventually(lambda: service.metric("osd_running_requests") == service.metric("osd_waiting_requests") == 0)
    places = service.settings.serving.max_queue
    for _ in range(6):  # enough to reach both replicas
        assert service.complete(n=places, max_tokens=2).status_code == 200


def test_generated_requests_are_answered_or_refused(service, eventually):
    seen = flood(service, 400)
    assert seen[200] > 20
    assert seen[400] > 20
    expect_as_before(service, eventually)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.fault(
    "10,000 generated requests, from valid to nonsense, and broken HTTP",
    "each gets an answer in OpenAI's format, no 5xx except 503 and 504, and all slots are free afterwards",
    process="replica, proxy: hostile requests",
)
def test_ten_thousand_generated_requests_are_answered(service, eventually, fault_result):
    seen = flood(service, 10_000)
    assert seen[200] > 500
    failed = {status: count for status, count in seen.items() if status in EXPECTED_ERRORS}
    fault_result.errors = (
        ", ".join(f"{status}: {count}" for status, count in sorted(failed.items())) or "none above 499"
    )
    fault_result.lost = "nothing"
    expect_as_before(service, eventually)
