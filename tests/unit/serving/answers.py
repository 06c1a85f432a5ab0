"""What the tests of the routes send, and how they read what comes back."""

from __future__ import annotations

import json

from starlette.testclient import TestClient

from osd.engine.lifetime import Lifetime
from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from serving.api.routes import create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def asking(service, **options):
    """A client of the application on loopback, as the service stands there by default."""
    options = {"base_url": "http://127.0.0.1", "raise_server_exceptions": False, **options}
    return TestClient(create_app(service), **options)


def updates_of(request):
    """Two rounds of a sequence that drafted; it waited 2 s, read for 1 and decoded for 4."""
    came, counts = request.arrived, SpeculationCounts()
    for accepted in (2, 0):
        counts.count({"recall": 3}, ["recall"] * accepted)
    lifetime = Lifetime(came, came + 0.5, came + 2.5, came + 3.5, came + 7.5)
    ended = Update(request.id, (3,), "lo", "stop", counts, cached_tokens=4, lifetime=lifetime, drafted=("code", 7))
    return [Update(request.id, (1, 2), "Hel"), ended]


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events_of(response):
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
