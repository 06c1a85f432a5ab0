"""The HTTP application in front of one replica: the paths of the other files of this folder, and who may ask them."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI

from serving import dashboard, errors, reference
from serving.access.guard import BudgetGuard, KeyGuard
from serving.admin import AdminRoutes
from serving.engine_requests import EngineRequests
from serving.generate_routes import GenerateRoutes
from serving.hosts import HostGuard, allowed_hosts
from serving.limits import ARRIVING_BYTES, Arrivals
from serving.model_routes import ModelRoutes
from serving.server_routes import ServerRoutes
from serving.service import Service
from serving.telemetry.observing import Observer, Observing
from serving.telemetry.request_log import log_request
from serving.tokenizer_routes import TokenizerRoutes
from serving.tokenizing import Tokenizing


def create_app(service: Service, observers: Iterable[Observer] = ()) -> FastAPI:
    """The application in front of one replica; ``observers`` hear of each request in the end."""
    app = FastAPI(title="osd", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    limits, tokenizing, models = service.settings.serving, Tokenizing(service), ModelRoutes(service)
    arrivals = Arrivals(limits.max_queue, max(ARRIVING_BYTES, limits.max_body_bytes))
    described = [
        one.router
        for one in (
            GenerateRoutes(service, EngineRequests(service, models, tokenizing), tokenizing, arrivals),
            TokenizerRoutes(service, models, tokenizing, arrivals),
            models,
            ServerRoutes(service),
            AdminRoutes(service),
        )
    ]
    for router in (*described, reference.router(described), dashboard.router(service)):
        app.include_router(router)
    # The one that is added last sees a request first.
    app.add_middleware(BudgetGuard, budgets=service.access.budgets)
    app.add_middleware(KeyGuard, keyring=service.access.keyring, open_paths=dashboard.OPEN_PATHS | reference.OPEN_PATHS)
    if (names := allowed_hosts(limits)) is not None:
        app.add_middleware(HostGuard, names=names)
    app.add_middleware(Observing, observers=[*observers, log_request])
    return app
