"""Proxy: an ASGI application that forwards requests and answers unchanged."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from starlette.types import Message, Receive, Scope, Send

from osd.addresses import host_of, is_loopback
from osd.tap.captures import Captures
from osd.tap.metrics import TapMetrics
from osd.tap.reading import Copy
from osd.tap.upstream import Upstream, end_to_end_headers

logger = logging.getLogger(__name__)

_SENT, _ANSWERED = "http11.send_request_body.complete", "http11.receive_response_headers.complete"


class Proxy:
    """Proxy that forwards all requests and copies requests for capture."""

    def __init__(
        self, upstream: Upstream, captures: Captures, metrics: TapMetrics, names: frozenset[str] | None
    ) -> None:
        """Forward requests to ``upstream``.

        Args:
            upstream: server that answers.
            captures: capture of the exchanges.
            metrics: metrics of the tap.
            names: allowed host names in addition to loopback names; None for every name. On a loopback address, a
                foreign name means DNS rebinding by a web page.
        """
        self._upstream, self._captures, self._metrics, self._names = upstream, captures, metrics, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a disconnect of the client cancels it."""
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        client = _ProxyClient(receive, send, has_body, self._metrics)
        if not self._is_allowed(scope):
            return await client.refuse(403, "This 'Host' or 'Origin' is not one of tap.allowed_hosts.", "not_allowed")
        self._metrics.in_flight += 1
        relay, left = asyncio.ensure_future(self._relay(scope, client)), asyncio.ensure_future(client.left())
        try:
            await asyncio.wait((relay, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # After a disconnect, cancelling the relay closes its connection to the upstream.
            relay.cancel()
            left.cancel()
            ends = await asyncio.gather(relay, left, return_exceptions=True)
            self._metrics.in_flight -= 1
        if isinstance(ends[0], Exception):
            logger.error("a request failed in the tap", exc_info=ends[0])

    def _is_allowed(self, scope: Scope) -> bool:
        if self._names is None:
            return True
        hosts = [host_of(f"//{value.decode('latin-1')}") for name, value in scope["headers"] if name == b"host"]
        hosts += [host_of(value.decode("latin-1")) for name, value in scope["headers"] if name == b"origin"]
        return bool(hosts) and all(host is not None and (host in self._names or is_loopback(host)) for host in hosts)

    async def _relay(self, scope: Scope, client: _ProxyClient) -> None:
        copy = self._captures.begin(scope["method"], scope["path"])
        headers = scope["headers"]
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        clock = _Clock()
        try:
            body = client.body(copy) if client.has_body else None
            answer = await self._upstream.send(scope["method"], target, headers, body, clock.step)
        except httpx2.TransportError as error:
            logger.warning("the upstream gave no answer: %s", type(error).__name__)
            self._metrics.errors.labels("unreachable").inc()
            return await client.refuse(502, "The upstream gives no answer. Try again later.", "upstream_unreachable")
        stream = answer.stream
        assert isinstance(stream, httpx2.AsyncByteStream)  # noqa: S101 - AsyncHTTPTransport returns this type
        try:
            await client.begin(answer.status_code, end_to_end_headers(answer.headers.raw))
            if copy is not None:
                copy.begin(headers, answer.status_code, answer.headers)
            async for part in stream:
                await client.more(part)
                if clock.answered:
                    self._metrics.added.observe(clock.added())
                if copy is not None:
                    copy.answer(part)
            await client.end()
        except httpx2.TransportError as error:
            # The client sees an incomplete response, as without the tap.
            logger.warning("the upstream's answer is incomplete: %s", type(error).__name__)
            self._metrics.errors.labels("broken").inc()
            return
        else:
            if copy is not None:
                copy.complete = True
        finally:
            if copy is not None:
                self._captures.end(copy)
            await stream.aclose()


class _Clock:
    """Stopwatch of the delay that a tap adds to a request."""

    def __init__(self) -> None:
        self._began, self._sent = time.perf_counter(), 0.0
        self.answered = 0.0

    async def step(self, name: str, _about: dict[str, Any]) -> None:
        """Record the times at which the upstream has the request and begins its answer; a hook of the HTTP client."""
        if name == _SENT:
            self._sent = time.perf_counter()
        elif name == _ANSWERED:
            self.answered = time.perf_counter()

    def added(self) -> float:
        """Return the added delay in seconds; call it once, after the first bytes were sent to the client."""
        answered, self.answered = self.answered, 0.0
        return self._sent - self._began + time.perf_counter() - answered


class _ProxyClient:
    """Client of a request; ``has_body`` is true if it sends a body."""

    def __init__(self, receive: Receive, send: Send, has_body: bool, metrics: TapMetrics) -> None:
        self._receive, self._send, self.has_body, self._metrics = receive, send, has_body, metrics
        self._read = asyncio.Event()
        self._gone = False

    async def body(self, copy: Copy | None) -> AsyncIterator[bytes]:
        """Yield the body and add it to ``copy``."""
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._gone = True
                    self._read.set()
                    await asyncio.get_running_loop().create_future()  # wait for the cancellation of the request
                part = message.get("body", b"")
                if copy is not None:
                    copy.request(part)
                if part:
                    yield part
                if not message.get("more_body"):
                    return
        finally:
            self._read.set()

    async def left(self) -> None:
        """Wait until the client disconnects; ``body`` must be read if there is a body."""
        message: Message = {"type": ""}
        if self.has_body:
            await self._read.wait()
        while not self._gone and message["type"] != "http.disconnect":
            message = await self._receive()

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status and headers of an answer."""
        self._metrics.requests.labels(str(status)).inc()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def more(self, part: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, status: int, message: str, code: str) -> None:
        """Send an error of the tap in OpenAI's format."""
        error = {"message": message, "type": "server_error" if status >= 500 else "invalid_request_error"}
        body = json.dumps({"error": {**error, "param": None, "code": code}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.begin(status, headers)
        await self.more(body)
        await self.end()
