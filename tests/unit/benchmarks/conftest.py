"""A service that answers at its own pace, for what measures services."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.http_servers import answering
from tests.unit.benchmarks.recorded import made_up, small_experiment

PIECE = 0.02  # seconds between two pieces of an answer


class Handler(BaseHTTPRequestHandler):
    """Answers each request with three pieces of two tokens; refuses prompts that say so."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        for replica in ("one", "other") * (self.path == "/metrics"):
            self.wfile.write(f'osd_running_requests{{replica="{replica}"}} 0\n'.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(503 if body["messages"][0]["content"] == "refuse" else 200)
        self.end_headers()
        for number in range(3):
            time.sleep(PIECE)
            end = "stop" if number == 2 else None
            self._event({"choices": [{"delta": {"content": "ab"}, "finish_reason": end}]})
        self._event({"choices": [], "usage": {"completion_tokens": 6}})

    def _event(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def service() -> Iterator[ThreadingHTTPServer]:
    with answering(Handler) as server:
        server.bodies = []  # type: ignore[attr-defined]
        yield server


@pytest.fixture(scope="session")
def experiment(tmp_path_factory):
    return small_experiment(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def stream(experiment):
    return experiment.stream("tiny", made_up(32))
