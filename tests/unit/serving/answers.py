"""Requests that the tests of the routes send, and readers of the responses."""

from __future__ import annotations

import json

from starlette.testclient import TestClient

from osd.engine.lifetime import Lifetime
from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from serving.api.routes import create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def asking(service, **options):
    """Return a client of the application on loopback."""
    options = {"base_url": "http://127.0.0.1", "raise_server_exceptions": False, **options}
    return TestClient(create_app(service), **options)


def updates_of(request):
    """Return the updates of two decoding steps with drafts: 2 s queued, 1 s prefill, 4 s decode."""
    arrived, counts = request.arrived, SpeculationCounts()
    for accepted in (2, 0):
        counts.count({"recall": 3}, ["recall"] * accepted)
    lifetime = Lifetime(arrived, arrived + 0.5, arrived + 2.5, arrived + 3.5, arrived + 7.5)
    ended = Update(request.id, (3,), "lo", "stop", counts, cached_tokens=4, lifetime=lifetime, drafted=("code", 7))
    return [Update(request.id, (1, 2), "Hel"), ended]


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def refusal_of(response, param, reason):
    """Check that a response is a 400 that names ``param`` and gives the reason; return its error."""
    error = error_of(response, 400)
    assert error["param"] == param
    assert reason in error["message"]
    return error


def events_of(response):
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
