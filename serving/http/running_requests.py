"""Running requests of a replica, and their end when the replica shuts down."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.access.guard import OPEN_PATHS
from serving.http.errors import stopping
from serving.http.paths import STREAM
from serving.http.sse import Reply


class RunningRequests:
    """Requests that run in a replica, from arrival until the response is sent; use it on the event loop only.

    Requests for metrics, models and the dashboard do not count. Streams of the dashboard end at once when the replica
    shuts down, and their clients reconnect to another replica.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()
        self._following: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return ASGI middleware that counts the requests of ``app`` and answers 503 after ``drain`` was called."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            follows = scope["type"] == "http" and scope["path"] == STREAM
            works = scope["type"] == "http" and (scope["method"] == "POST" or scope["path"] in OPEN_PATHS)
            if not (works or follows):
                return await app(scope, receive, send)
            reply = Reply(scope, receive, send)
            if self._stopping:
                return await reply.fail(stopping())
            limit = asyncio.timeout(None)
            if follows:
                self._following.add(limit)
            else:
                self._running.add(limit)
                self._idle.clear()
            try:
                async with limit:
                    await app(scope, receive, reply.send)
            except TimeoutError:
                if not limit.expired():
                    raise
                await reply.fail(stopping())
            finally:
                self._running.discard(limit)
                self._following.discard(limit)
                if not self._running:
                    self._idle.set()

        return guarded

    async def drain(self, seconds: float) -> int:
        """Refuse new requests and wait until none runs.

        Requests that still run after ``seconds`` end with an error.

        Returns:
            Number of requests that were ended.
        """
        self._stopping = True
        for limit in self._following:
            limit.reschedule(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        late = [limit for limit in self._running if not limit.expired()]
        for limit in late:
            limit.reschedule(0)
        await self._idle.wait()
        return len(late)
