"""Routes for health, load, version, metrics, and the model with its domains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import osd
from osd.config import tenant_of
from serving.access.keys import caller_of
from serving.http.errors import ApiError
from serving.monitored import Monitored
from serving.reference.document import described
from serving.reference.shapes import HealthStatus, ModelCard, ModelList, ServerLoad, ServerVersion
from serving.served_model import ServedModel


class ServerRoutes:
    """Handlers of the health, load, version and metrics routes."""

    def __init__(self, service: Monitored, check_health: Callable[[], Awaitable[None]]) -> None:
        """Add the routes; ``check_health`` raises an error with one sentence if the replica cannot decode."""
        self.service, self._check_health = service, check_health
        self.router = APIRouter()
        for path, handler, operation in (
            ("/health", self.health, described("Check that the replica can decode.", HealthStatus)),
            ("/load", self.load, described("Return the running and waiting requests of all replicas.", ServerLoad)),
            ("/version", self.version, described("Return the version of osd.", ServerVersion)),
            ("/metrics", service.metrics, described("Return the metrics of all replicas in Prometheus' text format.")),
        ):
            self.router.add_api_route(path, handler, methods=["GET"], **operation)

    async def health(self) -> Response:
        """Handle ``GET /health``: 200 while this replica can decode, else 503."""
        try:
            await self._check_health()
        except Exception as error:
            raise ApiError(503, f"This replica cannot decode: {error}.", kind="server_error") from error
        return JSONResponse({"status": "ok"})

    async def load(self) -> Response:
        """Handle ``GET /load``: return the number of running and waiting requests of all replicas."""
        gauges = [report.gauges for report in (await self.service.totals()).replicas]
        return JSONResponse({"server_load": sum(replica["running"] + replica["waiting"] for replica in gauges)})

    async def version(self) -> Response:
        """Handle ``GET /version``."""
        return JSONResponse({"version": osd.__version__})


class ModelRoutes:
    """Handlers of the model routes, and the mapping from model names to domains."""

    def __init__(self, service: Monitored) -> None:
        self.service = service
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/v1/models", self.models, methods=["GET"], **described("List the model and its domains.", ModelList))
        add(
            "/v1/models/{model:path}",
            self.model,
            methods=["GET"],
            **described("Return a model of the list.", ModelCard),
        )

    async def models(self, request: Request) -> Response:
        """Handle ``GET /v1/models``: list the model alone and with each domain of the caller that has a drafter."""
        domains = await self._domains(caller_of(request).tenant)
        cards = [_card(self.service.model, domain) for domain in (None, *domains)]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request, model: str) -> Response:
        """Handle ``GET /v1/models/{id}``."""
        return JSONResponse(_card(self.service.model, await self.domain_of(model, caller_of(request).tenant)))

    async def domain_of(self, name: str | None, tenant: str) -> str | None:
        """Return the domain in a model name ``MODEL:DOMAIN``; None for a name without a domain.

        Raises:
            ApiError: status 404 if the model is unknown or the domain has no drafter.
        """
        model = self.service.model.id
        if name is None or name == model:
            return None
        domain = name.removeprefix(f"{model}:")
        if domain != name and domain in await self._domains(tenant):
            return domain
        message = (
            f"The model does not exist. This server serves '{model}', and '{model}:DOMAIN' for domains of /v1/models."
        )
        raise ApiError(404, message, param="model", code="model_not_found")

    async def _domains(self, tenant: str) -> list[str]:
        """Return the domains of ``tenant`` that have a drafter in a replica, without the tenant's prefix."""
        settings = self.service.settings
        domains = {settings.domain} if settings.drafts else set[str]()
        for replica in (await self.service.totals()).replicas:
            domains.update(replica.domains)
        return sorted(name.removeprefix(f"{tenant}.") for name in domains if tenant_of(name) == tenant)


def _card(model: ServedModel, domain: str | None) -> dict[str, Any]:
    return {
        "id": model.id if domain is None else f"{model.id}:{domain}",
        "object": "model",
        "created": model.created,
        "owned_by": "osd",
        "root": model.root,
        "parent": None if domain is None else model.id,
        "max_model_len": model.context,
    }
