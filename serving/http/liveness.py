"""Signs of life of a replica during a request, from the replica to Ray Serve's proxy.

A node that fails silently closes no connection, and Ray notices it late. A replica therefore sends a message for each
running request every few seconds, and the proxy ends a request that receives no message for longer.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SIGN: Message = {"type": "osd.alive"}
"""ASGI message that the proxy drops."""

SIGN_SECONDS, SILENCE_SECONDS = 5.0, 20.0
"""Seconds between two signs of life, and without any message after which a request ends with an error."""


class SignsOfLife:
    """Replica side: ASGI middleware that sends a sign of life every five seconds while a request runs."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        signs = asyncio.create_task(_send_signs(send))
        try:
            await self.app(scope, receive, send)
        finally:
            signs.cancel()


async def _send_signs(send: Send) -> None:
    while True:
        await asyncio.sleep(SIGN_SECONDS)
        await send(_SIGN)


class Silence:
    """Proxy side: time limit for the next message of a replica.

    Enter ``limit`` around the call of the application, and pass each message through ``heard``. Time in which a client
    does not read does not count.
    """

    def __init__(self) -> None:
        self.limit = asyncio.timeout(SILENCE_SECONDS)

    @property
    def is_over_limit(self) -> bool:
        """Whether the replica was silent for too long."""
        return self.limit.expired()

    async def heard(self, send: Send, message: Message) -> None:
        """Forward a message of the application, unless it is a sign of life or comes after the limit."""
        if self.is_over_limit:
            return
        self.limit.reschedule(None)
        if message["type"] != _SIGN["type"]:
            await send(message)
        self.limit.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
