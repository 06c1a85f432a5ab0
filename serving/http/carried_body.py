"""A body that travels with the head of its request from Ray Serve's proxy to the replica.

Ray has the replica fetch each body by a call of its own, which takes milliseconds of the first token. What has arrived
with the head is put into the ASGI scope instead; what comes later is fetched as ever.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "osd.body"


class ClientMessages:
    """The proxy's side: the messages of one client, which may be looked at before the application receives them.

    Lifetime: ``close`` in the end, however it ends. ``left`` says whether the client has left.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self._coming: asyncio.Task[Message] | None = None
        self.left = False

    async def receive(self) -> Message:
        """Return the next message, those that were looked at first."""
        return self._ahead.popleft() if self._ahead else await self._next()

    async def body(self, most: int, seconds: float) -> bytes:
        """Look at the body; empty where it has more than ``most`` bytes or is not there in so many ``seconds``."""
        parts: list[bytes] = []
        end = time.monotonic() + seconds
        while sum(map(len, parts)) <= most:
            # It goes on to be received where nobody waits for it here any more.
            await asyncio.wait({coming := self._begun()}, timeout=end - time.monotonic())
            if not coming.done():
                break
            self._ahead.append(message := await self._next())
            if message["type"] != "http.request":
                break
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)
        return b""

    async def carry(self, scope: Scope) -> Scope:
        """Return the scope with the body, if the next message is all of it and is there; waits for nothing."""
        if not self._ahead:
            coming = self._begun()
            await asyncio.sleep(0)
            if not coming.done() or coming.exception() is not None:
                return scope
            self._ahead.append(await self._next())
        if self._ahead[0]["type"] != "http.request" or self._ahead[0].get("more_body"):
            return scope
        return {**scope, "extensions": {**scope.get("extensions", {}), _KEY: self._ahead.popleft()["body"]}}

    def close(self) -> None:
        """Wait for no message any more."""
        if self._coming is not None:
            self._coming.cancel()

    def _begun(self) -> asyncio.Task[Message]:
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._receive())
        return self._coming

    async def _next(self) -> Message:
        coming, self._coming = self._begun(), None
        message = await coming
        self.left = self.left or message["type"] == "http.disconnect"
        return message


class Carried:
    """ASGI middleware, the replica's side: applications receive a body that the scope carries as any other."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        extensions = scope.get("extensions", {})
        if _KEY not in extensions:
            return await self.app(scope, receive, send)
        bodies = [extensions[_KEY]]

        async def body_first() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await receive()

        await self.app(scope, body_first, send)
