"""HTTP servers of tests, in their own threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.waiting import background


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """Run a server on loopback that ``handler`` answers for; it logs nothing."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), quiet)
    with server, background(lambda: server.serve_forever(0.01), server.shutdown):
        yield server
