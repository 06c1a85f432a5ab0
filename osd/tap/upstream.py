"""The server behind a tap: requests go to it as they came, over connections that are kept."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2

Header = tuple[bytes, bytes]
Trace = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Called with the name of each step of a request on its way, and what is known of it."""

_CONNECT_SECONDS = 10.0
_KEPT, _KEPT_SECONDS = 512, 3.0  # servers close idle connections after five seconds, most of them
_OF_THE_CONNECTION = frozenset(
    b"connection keep-alive proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_OF_THE_REQUEST = frozenset((b"host", b"expect"))  # who it was addressed to, and what the tap has answered already


class AddressError(ValueError):
    """An upstream's address is none; the message is one line."""


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, body: AsyncIterable[bytes]) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part


class Upstream:
    """Sends requests to one server.

    Raises:
        AddressError: its ``url`` is no address.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise AddressError(f"--upstream must be an address as http://127.0.0.1:8000 is, not {url}")
        self._base, self._path, self._host = httpx2.URL(self.url), parts.path.encode(), parts.netloc.encode()
        # As many at once as clients ask for: a tap must not have them wait.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_KEPT, keepalive_expiry=_KEPT_SECONDS)
        self._transport = httpx2.AsyncHTTPTransport(limits=limits, trust_env=False)

    async def send(
        self, method: str, target: bytes, headers: Sequence[Header], body: AsyncIterable[bytes] | None, trace: Trace
    ) -> httpx2.Response:
        """The head of an answer, whose ``stream`` gives the bytes of its body as they come, and has to be closed.

        ``target`` is the path with its query; ``body`` None where there is none.

        Raises:
            httpx2.TransportError: there is none.
        """
        passed = [*passing(headers, _OF_THE_REQUEST), (b"host", self._host)]
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


def passing(headers: Sequence[Header], more: frozenset[bytes] = frozenset()) -> list[Header]:
    """The headers that go further than one connection, without ``more`` of them."""
    named = {
        name.strip().lower()
        for header, value in headers
        if header.lower() == b"connection"
        for name in value.split(b",")
    }
    left = _OF_THE_CONNECTION | more | named
    return [(name, value) for name, value in headers if name.lower() not in left]
