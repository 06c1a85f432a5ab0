"""Fixtures for benchmarks: a service with fixed answer times, a worker, models and a recorded experiment."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.peers import environments
from benchmarks.peers.roster import PeerModels
from tests.http_servers import answering
from tests.unit.benchmarks.recorded import made_up, small_experiment

PIECE = 0.02  # seconds between two parts of an answer


class Handler(BaseHTTPRequestHandler):
    """Answers each request with three parts of two tokens; refuses the prompt "refuse"."""

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


@pytest.fixture
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command of a worker that serves the class ``Fake`` in the module's source text ``FAKE``."""
    script, folder = tmp_path / "fake.py", Path(environments.__file__).parent
    head = f"import os, sys, time\nsys.path.insert(0, {str(folder)!r})\nimport worker\n"
    script.write_text(f"{head}{request.module.FAKE}worker.serve(Fake)\n")
    return [sys.executable, "-u", str(script)]


@pytest.fixture
def models(tmp_path: Path) -> PeerModels:
    return PeerModels(tmp_path, "float32", 64, 1, 1, None, tmp_path, None)


@pytest.fixture(scope="session")
def experiment(tmp_path_factory):
    return small_experiment(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def stream(experiment):
    return experiment.stream("tiny", made_up(32))
