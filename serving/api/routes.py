"""HTTP application of a replica: all routes, and the middleware for access control and logging."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI

from serving import dashboard, reference
from serving.access.guard import BudgetGuard, HostGuard, KeyGuard, allowed_hosts
from serving.api.admin import AdminRoutes
from serving.api.engine_requests import EngineRequests
from serving.api.generate_routes import GenerateRoutes
from serving.api.server_routes import ModelRoutes, ServerRoutes
from serving.api.tokenizer_routes import TokenizerRoutes, Tokenizing
from serving.http import errors
from serving.http.limits import ARRIVING_BYTES, Arrivals
from serving.replica.replica import Replica
from serving.telemetry.observed import Observer, Observing, log_request


def create_app(service: Replica, observers: Iterable[Observer] = ()) -> FastAPI:
    """Return the HTTP application of a replica; each observer is called with every finished request."""
    app = errors.empty_app()
    limits, tokenizing, models = service.settings.serving, Tokenizing(service), ModelRoutes(service)
    arrivals = Arrivals(limits, limits.max_queue, max(ARRIVING_BYTES, limits.max_body_bytes))

    async def check_health() -> None:
        service.check_health()

    api_routers = [
        routes.router
        for routes in (
            GenerateRoutes(service, EngineRequests(service, models, tokenizing), arrivals),
            TokenizerRoutes(service, models, tokenizing, arrivals),
            models,
            ServerRoutes(service, check_health),
            AdminRoutes(service),
        )
    ]
    for router in (*api_routers, reference.router(api_routers), dashboard.router(service)):
        app.include_router(router)
    # The middleware that is added last handles a request first.
    app.add_middleware(BudgetGuard, budgets=service.access.budgets)
    app.add_middleware(KeyGuard, keyring=service.access.keyring, open_paths=dashboard.OPEN_PATHS | reference.OPEN_PATHS)
    if (names := allowed_hosts(limits)) is not None:
        app.add_middleware(HostGuard, names=names)
    app.add_middleware(Observing, observers=[*observers, log_request])
    return app
