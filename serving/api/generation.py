"""From one HTTP request to sequences in the engine, and back: bridged to asyncio, cancelled when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Receive

from osd.engine.request import Request, Update
from serving.http.errors import ApiError, stopping
from serving.http.limits import Admission
from serving.service import Service
from serving.telemetry.observed import ObservedRequest

logger = logging.getLogger(__name__)

UNREAD_SECONDS = 60.0
"""For which an update may lie unread: who reads none for so long is gone, whatever the connection says."""


class Disconnected(Exception):
    """The client is gone: nothing more needs to be computed or sent."""


class Generation:
    """The sequences of one HTTP request, decoded side by side.

    A client that disconnects, a proxy in front that dies and a reader that takes nothing end them within a round, also
    while the response blocks in sending.

    Lifetime: ``start`` takes places in the queue and submits; ``updates`` yields until every sequence has finished;
    ``close`` (any number of times) cancels what still runs and gives the places back. ``seconds`` after ``start`` it
    ends as a failure; None is never. ``charge`` is called with the tokens of every round, and ``observed`` is told what
    the engine says.
    """

    def __init__(
        self,
        service: Service,
        admission: Admission,
        requests: Sequence[Request],
        seconds: float | None,
        charge: Callable[[int], None],
        observed: ObservedRequest,
    ) -> None:
        self._service, self._admission, self._seconds, self._charge = service, admission, seconds, charge
        self._requests = {request.id: index for index, request in enumerate(requests)}
        self._pending = list(requests)
        self._observed = observed
        self._running: set[str] = set()
        self._updates: asyncio.Queue[Update | Disconnected | ApiError] = asyncio.Queue()
        self._watch: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
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
                loop.call_soon_threadsafe(self._arrived, update)

        self._watch = loop.create_task(self._wait_for_disconnect(receive))
        if self._seconds is not None:
            message = f"The answer took longer than {self._seconds:g} seconds."
            late = ApiError(504, message, kind="server_error", code="timeout")
            self._deadline = loop.call_later(self._seconds, self._end, late)
        for request in self._pending:
            self._running.add(request.id)
            self._service.submit(request, deliver)
            self._observed.submitted(request)

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yield (index of the sequence, update) as rounds complete.

        Raises:
            Disconnected: the client is gone.
            ApiError: a sequence failed, the engine gave it up, or the time is over.
        """
        while self._running:
            update = await self._updates.get()
            self._expect_reader(anew=True)
            if isinstance(update, Exception):
                raise update
            if update.finish_reason is not None:
                self._running.discard(update.request_id)
            if update.finish_reason == "error":
                logger.error("request %s failed in the engine: %s", update.request_id, update.error)
                raise ApiError(500, "The engine failed; the server's log says why.", kind="server_error")
            if update.finish_reason == "cancelled":
                raise stopping()
            yield self._requests[update.request_id], update

    def close(self) -> None:
        """Cancel what still runs."""
        if self._watch is not None:
            self._watch.cancel()
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        self._give_up()
        self._running.clear()

    def _arrived(self, update: Update) -> None:
        self._charge(len(update.token_ids))  # also when nobody reads it any more
        self._observed.heard(update)
        self._updates.put_nowait(update)
        self._expect_reader(anew=False)

    def _expect_reader(self, anew: bool) -> None:
        """Have a deadline for the next read while something is unread, from now on where it is set ``anew``."""
        if self._unread is not None and anew:
            self._unread.cancel()
            self._unread = None
        if self._unread is None and self._running and not self._updates.empty():
            self._unread = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._end, Disconnected())

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as error:  # what is in front of us died, and whoever it answered has lost the connection
            logger.warning("a request is given up, nobody listens any more: %s", type(error).__name__)
        self._end(Disconnected())

    def _end(self, why: Disconnected | ApiError) -> None:
        # Cancel here and not where updates are read: a reader that is blocked in sending must not delay it.
        self._give_up()
        self._updates.put_nowait(why)

    def _give_up(self) -> None:
        for request_id in self._running:
            self._service.cancel(request_id)
        self._admission.leave(self._places)
        self._places = 0
