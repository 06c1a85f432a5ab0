"""Watches requests from their arrival on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.telemetry.observed import ObservedRequest, state_of

logger = logging.getLogger(__name__)

Observer = Callable[[ObservedRequest], None]
"""Hears of each request once it is answered and all its sequences have ended, on the event loop; must not block."""


class Observing:
    """ASGI middleware: routes can say what they know of a request, and in the end all ``observers`` hear of it."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self.app, self._observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        observed = ObservedRequest(scope, self._tell)
        state = {**scope.get("state", {}), **state_of(observed)}
        try:
            await self.app({**scope, "state": state}, receive, partial(_sent, observed, send))
        finally:
            observed.answered()

    def _tell(self, observed: ObservedRequest) -> None:
        for observer in self._observers:
            try:
                observer(observed)
            except Exception:  # what cannot be told costs nobody an answer
                logger.exception("a request cannot be told of")


async def _sent(observed: ObservedRequest, send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        observed.status = message["status"]
    await send(message)
