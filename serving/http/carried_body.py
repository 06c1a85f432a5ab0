"""Transport of a request body in the ASGI scope, from Ray Serve's proxy to the replica.

By default the replica fetches each part of a body with a remote call, which takes milliseconds of both processes. A
body that arrived together with the headers is put into the scope instead. A later body is fetched by Ray; its parts are
joined, so that a client that sends single bytes causes a call a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "osd.body"
_JOIN_SECONDS, _JOIN_BYTES = 1.0, 1 << 20


class ClientMessages:
    """Proxy side: messages of a client, which the proxy can read before the application receives them.

    Call ``close`` when the request ends. ``disconnected`` is true after the client disconnected.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self._pending: asyncio.Task[Message] | None = None
        self.disconnected = False

    async def receive(self) -> Message:
        """Return the next message, with the parts of the body that follow it within a second, up to a megabyte."""
        message = await self._read()
        parts, size, end = [message.get("body", b"")], 0, time.monotonic() + _JOIN_SECONDS
        while message.get("more_body") and (size := size + len(parts[-1])) < _JOIN_BYTES:
            if not self._ahead:
                await asyncio.wait({pending := self._start()}, timeout=end - time.monotonic())
                if not pending.done():
                    break
            following = await self._read()
            if following["type"] != "http.request":
                self._ahead.appendleft(following)
                break
            message = following
            parts.append(message.get("body", b""))
        return message if len(parts) == 1 else {**message, "body": b"".join(parts)}

    async def body(self, limit: int, seconds: float) -> bytes:
        """Read the body ahead; the application still receives it.

        Returns:
            The body, or b"" if it is larger than ``limit`` bytes or does not arrive within ``seconds``.
        """
        parts: list[bytes] = []
        end = time.monotonic() + seconds
        while sum(map(len, parts)) <= limit:
            # After a timeout the task stays pending, and receive() returns its message later.
            await asyncio.wait({pending := self._start()}, timeout=end - time.monotonic())
            if not pending.done():
                break
            self._ahead.append(message := await self._next())
            if message["type"] != "http.request":
                break
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)
        return b""

    async def carry(self, scope: Scope) -> Scope:
        """Return the scope with the body, if the whole body has already arrived; otherwise the scope itself."""
        if not self._ahead:
            pending = self._start()
            await asyncio.sleep(0)
            if not pending.done() or pending.exception() is not None:
                return scope
            self._ahead.append(await self._next())
        if self._ahead[0]["type"] != "http.request" or self._ahead[0].get("more_body"):
            return scope
        return {**scope, "extensions": {**scope.get("extensions", {}), _KEY: self._ahead.popleft()["body"]}}

    def close(self) -> None:
        """Stop waiting for messages."""
        if self._pending is not None:
            self._pending.cancel()

    def _start(self) -> asyncio.Task[Message]:
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._receive())
        return self._pending

    async def _read(self) -> Message:
        return self._ahead.popleft() if self._ahead else await self._next()

    async def _next(self) -> Message:
        pending, self._pending = self._start(), None
        message = await pending
        self.disconnected = self.disconnected or message["type"] == "http.disconnect"
        return message


class CarriedBody:
    """Replica side: ASGI middleware that delivers the body in the scope as an ordinary message."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        extensions = scope.get("extensions", {})
        if _KEY not in extensions:
            return await self.app(scope, receive, send)
        bodies = [extensions[_KEY]]

        async def body_first() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await receive()

        await self.app(scope, body_first, send)
