"""HTTP client for the server behind a tap; it forwards requests unchanged over persistent connections."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2

Header = tuple[bytes, bytes]
Trace = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Function that is called with the name and the details of each step of a request."""

_CONNECT_SECONDS = 10.0
_KEPT, _KEPT_SECONDS = 512, 3.0  # most servers close idle connections after five seconds
_CONNECTION_HEADERS = frozenset(
    b"connection keep-alive proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_TAP_HEADERS = frozenset((b"host", b"expect"))  # the tap sets Host and answers Expect itself


class AddressError(ValueError):
    """Error of an invalid address of the upstream; the message is one line."""


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, body: AsyncIterable[bytes]) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part


class Upstream:
    """HTTP client for a single server."""

    def __init__(self, url: str) -> None:
        """Prepare connections to the server at ``url``, with or without /v1 at the end.

        Raises:
            AddressError: ``url`` is not an HTTP address.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise AddressError(f"--upstream must be an address like http://127.0.0.1:8000, not {url}")
        self._base, self._path, self._host = httpx2.URL(self.url), parts.path.encode(), parts.netloc.encode()
        # No limit on connections: the tap must not delay concurrent requests.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_KEPT, keepalive_expiry=_KEPT_SECONDS)
        self._transport = httpx2.AsyncHTTPTransport(limits=limits, trust_env=False)

    async def send(
        self, method: str, target: bytes, headers: Sequence[Header], body: AsyncIterable[bytes] | None, trace: Trace
    ) -> httpx2.Response:
        """Send a request and return the answer after its headers.

        Args:
            method: HTTP method.
            target: path with its query.
            headers: headers of the client.
            body: parts of the body; None without a body.
            trace: called at each step.

        Returns:
            The answer. Its ``stream`` yields the bytes of the body as they arrive; the caller must close it.

        Raises:
            httpx2.TransportError: the server did not answer.
        """
        passed = [*end_to_end_headers(headers, _TAP_HEADERS), (b"host", self._host)]
        if any(name == b"transfer-encoding" for name, _ in headers):
            passed.append((b"transfer-encoding", b"chunked"))
        request = httpx2.Request(
            method,
            self._base,
            headers=passed,
            stream=httpx2.ByteStream(b"") if body is None else _Stream(body),
            extensions={
                "target": self._path + target,
                "timeout": {"connect": _CONNECT_SECONDS, "read": None, "write": None, "pool": None},
                "trace": trace,
            },
        )
        return await self._transport.handle_async_request(request)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


def end_to_end_headers(headers: Sequence[Header], more: frozenset[bytes] = frozenset()) -> list[Header]:
    """Return the end-to-end headers, without those in ``more``; headers of a single connection are removed."""
    named = {
        name.strip().lower()
        for header, value in headers
        if header.lower() == b"connection"
        for name in value.split(b",")
    }
    removed = _CONNECTION_HEADERS | more | named
    return [(name, value) for name, value in headers if name.lower() not in removed]
