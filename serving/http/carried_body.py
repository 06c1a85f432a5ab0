"""A body that travels with the head of its request from Ray Serve's proxy to the replica.

Ray has the replica fetch each body by a call of its own, which takes milliseconds of the first token. What has arrived
with the head is put into the ASGI scope instead; what comes later is fetched as ever.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "osd.body"


class Carrying:
    """The proxy's side: takes a body into the scope where all of it is there; ``receive`` gives what follows.

    Lifetime: ``look`` first; ``close`` in the end, however it ends.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._first: asyncio.Task[Message] | None = None

    async def look(self, scope: Scope) -> Scope:
        """The scope with the first message in it, if that is the body and is there; waits for nothing."""
        first = asyncio.ensure_future(self._next())
        await asyncio.sleep(0)
        if first.done() and first.exception() is None and _whole(message := first.result()):
            return {**scope, "extensions": {**scope.get("extensions", {}), _KEY: message["body"]}}
        self._first = first
        return scope

    async def receive(self) -> Message:
        """What follows what the scope carries."""
        first, self._first = self._first, None
        return await (self._next() if first is None else first)

    def close(self) -> None:
        """Wait for no message any more."""
        if self._first is not None:
            self._first.cancel()

    async def _next(self) -> Message:
        return await self._receive()


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


def _whole(message: Message) -> bool:
    return message["type"] == "http.request" and not message.get("more_body", False)
