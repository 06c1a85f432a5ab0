"""HTTP/1.1 protocol of all servers, with limits on headers and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 << 10
"""Limit on the request line and headers together, and on the data between chunks of a body and on its trailers."""

HEAD_SECONDS = 20
"""Time limit for receiving the request line and headers."""


class _Refusal(NamedTuple):
    """Answer to a request whose head cannot be read."""

    status: int
    message: str
    code: str

    def head(self) -> bytes:
        """Return the status line and the headers."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"content-length: {len(self.body())}",
            "content-type: application/json",
            "connection: close",
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()

    def body(self) -> bytes:
        """Return the error in OpenAI's format."""
        error = {"message": self.message, "type": "invalid_request_error", "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


_TOO_LARGE = _Refusal(
    431, f"The request line and the headers are larger than {MOST_HEAD_BYTES} bytes.", "request_too_large"
)
_LATE = _Refusal(408, f"The request line and the headers did not arrive within {HEAD_SECONDS} seconds.", "timeout")
_BROKEN = _Refusal(400, "The request is not valid HTTP/1.1.", "invalid_http")


class BoundedProtocol(HttpToolsProtocol):
    """HTTP connection that answers one request at a time and does not support pipelining.

    If a request arrives before the previous one is answered, it is not read, and the connection closes after the
    current response, as HTTP allows. Otherwise a packet with a thousand small requests would fill the memory, and a
    disconnect would cancel the wrong request.
    """

    _head_bytes = 0  # since the last complete head or part of a body
    _ends = False
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the head of the first request, for a limited time."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit of a head, and end the connection."""
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; refuse a head of more than ``MOST_HEAD_BYTES`` bytes, and ignore data after a refusal."""
        if self._ends:
            return
        if self._late is None and not self._answering:
            self._expect_head()
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._ends and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Begin a request; stop the parser if the previous request is not answered yet."""
        if self._answering:
            self.cycle.keep_alive = False
            self._ends = True
            raise _NotReadError
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Pass a complete head to the application, unless its URL and headers are too large."""
        self._head_bytes = 0
        self._expect_nothing()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
            raise _NotReadError
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on; the limit applies to heads only."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body, after which the bytes of another head are counted."""
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to data that is not HTTP; the message of uvicorn is not used."""
        if not self._ends:
            self._refuse(_BROKEN)

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_is_late(self) -> None:
        if self._head_bytes:
            self._refuse(_LATE)
        else:  # no data at all: clients open connections in advance
            self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def count_refusal(self, status: int) -> None:
        """Count a request that is refused before it reaches the application; do nothing by default."""

    def _refuse(self, refusal: _Refusal) -> None:
        """Send the error and close the connection; if a response has started, only close the connection."""
        self._ends = True
        if not (self._answering and self.cycle.response_started):
            self.count_refusal(refusal.status)
            parser = self.parser
            body = b"" if parser is not None and parser.get_method() == b"HEAD" else refusal.body()
            self.transport.write(refusal.head() + body)
        self.transport.close()


class _NotReadError(Exception):
    """Signal to the parser to stop reading."""
