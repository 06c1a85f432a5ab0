"""From one HTTP request to sequences in the engine, and back: bridged to asyncio, cancelled when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence

from starlette.types import Receive

from osd.engine.request import Request, Update
from serving.errors import ApiError
from serving.limits import Admission
from serving.service import Service

logger = logging.getLogger(__name__)


class Disconnected(Exception):
    """The client is gone: nothing more needs to be computed or sent."""


class Generation:
    """The sequences of one HTTP request, decoded side by side.

    Lifetime: ``start`` takes places in the queue and submits; ``updates`` yields until every sequence has finished;
    ``close`` (any number of times) cancels what still runs and gives the places back. ``seconds`` after ``start`` it
    ends as a failure; None is never.
    """

    def __init__(
        self, service: Service, admission: Admission, requests: Sequence[Request], seconds: float | None
    ) -> None:
        self._service, self._admission, self._seconds = service, admission, seconds
        self._requests = {request.id: index for index, request in enumerate(requests)}
        self._pending = list(requests)
        self._running: set[str] = set()
        self._updates: asyncio.Queue[Update | Disconnected | ApiError] = asyncio.Queue()
        self._watch: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._places = 0

    def start(self, receive: Receive) -> None:
        """Submit everything and watch for a disconnect on ``receive``, whose body has been read.

        Raises:
            ApiError: 429, the queue is full.
        """
        self._admission.enter(len(self._pending))
        self._places = len(self._pending)
        loop = asyncio.get_running_loop()

        def deliver(update: Update) -> None:
            # A loop that is closed has nobody left to tell, and the engine's thread must not suffer from it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._updates.put_nowait, update)

        self._watch = loop.create_task(self._wait_for_disconnect(receive))
        if self._seconds is not None:
            message = f"The answer took longer than {self._seconds:g} seconds."
            late = ApiError(504, message, kind="server_error", code="timeout")
            self._deadline = loop.call_later(self._seconds, self._end, late)
        for request in self._pending:
            self._running.add(request.id)
            self._service.submit(request, deliver)

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yield (index of the sequence, update) as rounds complete.

        Raises:
            Disconnected: the client is gone.
            ApiError: a sequence failed, the engine gave it up, or the time is over.
        """
        while self._running:
            update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            if update.finish_reason is not None:
                self._running.discard(update.request_id)
            if update.finish_reason == "error":
                logger.error("request %s failed in the engine: %s", update.request_id, update.error)
                raise ApiError(500, "The engine failed; the server's log says why.", kind="server_error")
            if update.finish_reason == "cancelled":
                raise ApiError(503, "The server is stopping.", kind="server_error", headers={"Retry-After": "5"})
            yield self._requests[update.request_id], update

    def close(self) -> None:
        """Cancel what still runs."""
        if self._watch is not None:
            self._watch.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        for request_id in self._running:
            self._service.cancel(request_id)
        self._running.clear()
        self._admission.leave(self._places)
        self._places = 0

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(Disconnected())

    def _end(self, why: Disconnected | ApiError) -> None:
        # Cancel here and not where updates are read: a reader that is blocked in sending must not delay it.
        for request_id in self._running:
            self._service.cancel(request_id)
        self._updates.put_nowait(why)


def seed_of(seed: int, choice: int) -> int:
    """The seed of one of several choices, 63 bits; choice 0 is what a request for one choice draws."""
    seed %= 2**63
    if not choice:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
