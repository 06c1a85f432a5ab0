"""HTTP application of a replica with vLLM: our routes and access control around vLLM's application."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd.vllm.middleware import PRIVATE
from serving import dashboard
from serving.access.guard import BudgetGuard, HostGuard, KeyGuard, allowed_hosts
from serving.access.keys import caller_of
from serving.api.admin import AdminRoutes
from serving.api.server_routes import ServerRoutes
from serving.http import errors
from serving.http.errors import ApiError
from serving.http.limits import ARRIVING_BYTES, ArrivingBytes, queue_full, read_body
from serving.telemetry.observed import Observer, Observing, log_request
from serving.vllm import clients
from serving.vllm.service import VllmService

_FORWARDED, _FORWARDED_BELOW = frozenset({"/tokenize", "/detokenize"}), "/v1/"
_LOADS_FILES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths of vLLM that are not forwarded: their requests name files of the server."""


def create_app(service: VllmService, vllm: ASGIApp, observers: Iterable[Observer] = ()) -> ASGIApp:
    """Return the application of a replica.

    Args:
        service: metrics and dashboard of the replica.
        vllm: vLLM's application.
        observers: called with every finished request.
    """
    app: ASGIApp = Paths(_own_routes(service), Admission(vllm, service), vllm)
    app = BudgetGuard(app, service.access.budgets)
    app = KeyGuard(app, service.access.keyring, dashboard.OPEN_PATHS)
    if (names := allowed_hosts(service.settings.serving)) is not None:
        app = HostGuard(app, names)
    return Observing(app, [*observers, log_request])


def is_forwarded(path: str) -> bool:
    """Return whether vLLM answers a path. Its other paths administer it, and have no key of their own."""
    return path in _FORWARDED or (path.startswith(_FORWARDED_BELOW) and path not in _LOADS_FILES)


class Paths:
    """ASGI application that chooses between our routes and vLLM's by the path; vLLM's lifespan is its own.

    It closes WebSockets, because their messages would pass without limits.
    """

    def __init__(self, own: ASGIApp, forwarded: ASGIApp, vllm: ASGIApp) -> None:
        self._own, self._forwarded, self._vllm = own, forwarded, vllm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application that answers."""
        if scope["type"] == "lifespan":
            return await self._vllm(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        await (self._forwarded if is_forwarded(scope["path"]) else self._own)(scope, receive, send)


class Admission:
    """ASGI middleware in front of vLLM that limits requests and their bodies, and names their sender to the engine."""

    def __init__(self, vllm: ASGIApp, service: VllmService) -> None:
        self._vllm, self._limits = vllm, service.settings.serving
        self._bytes = ArrivingBytes(max(ARRIVING_BYTES, self._limits.max_body_bytes))
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request with its whole body, or send the error."""
        if scope["method"] != "POST":
            return await self._vllm(scope, receive, send)
        if self._running >= self._limits.max_queue:
            full = queue_full(f"{self._running} requests are running, which is this server's limit.")
            return await full.response()(scope, receive, send)
        self._running += 1
        try:
            await self._forward(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            self._running -= 1

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with self._bytes.hold() as arrived:
            bodies = [await read_body(request, self._limits, arrived)]

        async def receiving() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            return await receive()

        sender = caller_of(request)
        clients.caller.set(sender)
        # A vLLM has one drafter, and the data of a tenant must not train it.
        state = {**scope.get("state", {}), PRIVATE: bool(sender.tenant)}
        await self._vllm({**scope, "state": state}, receiving, send)


def _own_routes(service: VllmService) -> FastAPI:
    """Return the routes that vLLM does not answer."""
    app = errors.empty_app()
    server = ServerRoutes(service, service.check_health)
    for router in (server.router, AdminRoutes(service).router, dashboard.router(service)):
        app.include_router(router)
    return app
