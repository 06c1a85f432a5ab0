"""Bridge between an HTTP request and its sequences in the engine, with cancellation on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Receive

from osd.engine.request import Request, Update
from serving.http.errors import ApiError, Disconnected, invalid, stopping
from serving.http.limits import Admission
from serving.replica.replica import Replica
from serving.telemetry.observed import ObservedRequest

logger = logging.getLogger(__name__)

UNREAD_SECONDS = 60.0
"""Time limit for reading an update; a client that reads nothing for longer counts as disconnected."""


class Generation:
    """Sequences of an HTTP request, decoded concurrently.

    A disconnect, the death of the proxy or a client that reads nothing cancels the sequences within a decoding step,
    also while the response is blocked in sending.

    Lifetime: ``start`` enters the queue and submits the sequences. ``updates`` yields until all have finished.
    ``close``, which may be called repeatedly, cancels running sequences and leaves the queue.

    Args:
        service: service that decodes.
        admission: queue of the replica.
        requests: sequences to decode.
        seconds: time limit after ``start``, after which the request fails; None for no limit.
        charge: called with the number of new tokens of every update.
        observed: record of the request, which receives every update.
        form: field of the request that gives the form of the answer; "" for none.
    """

    def __init__(
        self,
        service: Replica,
        admission: Admission,
        requests: Sequence[Request],
        seconds: float | None,
        charge: Callable[[int], None],
        observed: ObservedRequest,
        form: str = "",
    ) -> None:
        self._form = form
        self._service, self._admission, self._seconds, self._charge = service, admission, seconds, charge
        self._requests = {request.id: index for index, request in enumerate(requests)}
        self._pending = list(requests)
        self._observed = observed
        self._running: set[str] = set()
        self._updates: asyncio.Queue[Update | Disconnected | ApiError] = asyncio.Queue()
        self._watch: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._queued = 0

    def start(self, receive: Receive) -> None:
        """Submit all sequences and watch ``receive`` for a disconnect; the body must have been read.

        Raises:
            ApiError: status 429 if the queue is full.
        """
        self._admission.enter(len(self._pending))
        self._queued = len(self._pending)
        loop = asyncio.get_running_loop()

        def deliver(update: Update) -> None:
            # After the loop is closed, the call fails. The engine's thread must not stop because of that.
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
        """Yield the index of a sequence and its update, for each update of the engine.

        Raises:
            Disconnected: the client disconnected.
            ApiError: a sequence failed, its form took too much work, the engine cancelled it, or the time limit was
                exceeded.
        """
        while self._running:
            update = await self._updates.get()
            self._expect_reader(restart=True)
            if isinstance(update, Exception):
                raise update
            if update.finish_reason is not None:
                self._running.discard(update.request_id)
            if update.refusal:
                raise invalid(f"'{self._form}' {update.refusal}.", self._form)
            if update.finish_reason == "error":
                logger.error("request %s failed in the engine: %s", update.request_id, update.error)
                raise ApiError(500, "The engine failed; the server's log says why.", kind="server_error")
            if update.finish_reason == "cancelled":
                raise stopping()
            yield self._requests[update.request_id], update

    def close(self) -> None:
        """Cancel running sequences and leave the queue."""
        if self._watch is not None:
            self._watch.cancel()
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        self._cancel_all()
        self._running.clear()

    def _arrived(self, update: Update) -> None:
        self._charge(len(update.token_ids))  # also after a disconnect
        self._observed.record(update)
        self._updates.put_nowait(update)
        self._expect_reader(restart=False)

    def _expect_reader(self, restart: bool) -> None:
        """Set a deadline for the next read if an update is unread; ``restart`` restarts a running deadline."""
        if self._unread is not None and restart:
            self._unread.cancel()
            self._unread = None
        if self._unread is None and self._running and not self._updates.empty():
            self._unread = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._end, Disconnected())

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as error:  # the proxy died, and with it the connection to the client
            logger.warning("a request is cancelled because its proxy failed: %s", type(error).__name__)
        self._end(Disconnected())

    def _end(self, reason: Disconnected | ApiError) -> None:
        # Cancel here, not in updates(): a response that is blocked in sending must not delay the cancellation.
        self._cancel_all()
        self._updates.put_nowait(reason)

    def _cancel_all(self) -> None:
        for request_id in self._running:
            self._service.cancel(request_id)
        self._admission.leave(self._queued)
        self._queued = 0
