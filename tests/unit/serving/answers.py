"""What the tests of the routes send, and how they read what comes back."""

from __future__ import annotations

import json

from starlette.testclient import TestClient

from serving.api.routes import create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def asking(service, **options):
    """A client of the application on loopback, as the service stands there by default."""
    options = {"base_url": "http://127.0.0.1", "raise_server_exceptions": False, **options}
    return TestClient(create_app(service), **options)


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
