"""Keeps keys within their limits."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.access.budgets import Budgets
from serving.access.caller import caller_of
from serving.access.guard import OPEN_PATHS
from serving.errors import ApiError


class BudgetGuard:
    """ASGI middleware: 429 for a key that has used what it may, and what is left on every answer of a limited key."""

    def __init__(self, app: ASGIApp, budgets: Budgets) -> None:
        self.app, self.budgets = app, budgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may go on."""
        key = caller_of(Request(scope)).key if scope["type"] == "http" else None
        if key is None or not key.limits or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        try:
            left = await self.budgets.admit(key)
        except ApiError as error:
            return await error.response()(scope, receive, send)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(left)
            await send(message)

        return await self.app(scope, receive, told)
