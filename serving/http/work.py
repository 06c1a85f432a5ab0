"""The requests that a replica works on, and how they end when it stops."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.access.guard import OPEN_PATHS
from serving.http.errors import stopping
from serving.http.paths import STREAM
from serving.http.sse import Reply


class Work:
    """What runs in one replica, from its arrival until its answer is sent; only used on the replica's event loop.

    Reading metrics, models and the dashboard is no work; whoever follows the dashboard is sent away at once, and finds
    another replica.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()
        self._following: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    def guard(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware: counts the work of ``app``, and answers 503 to what comes after ``drain`` was called."""

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
        """Take no more work, return when none runs, and after ``seconds`` end what does; says how many that were."""
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
