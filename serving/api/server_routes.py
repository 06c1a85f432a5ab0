"""The paths that tell of the server itself: health, load, version, metrics, and the model with its domains."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import osd
from osd.config import tenant_of
from serving.access.keys import caller_of
from serving.http.errors import ApiError
from serving.metrics import exposition
from serving.reference.document import described
from serving.reference.shapes import Health, ModelCard, ModelList, ServerLoad, ServerVersion
from serving.service import Model, Service


class ServerRoutes:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.router = APIRouter()
        for path, handler, said in (
            ("/health", self.health, described("200 while the replica decodes.", Health)),
            ("/load", self.load, described("Requests that run or wait, in all replicas.", ServerLoad)),
            ("/version", self.version, described("Which osd this is.", ServerVersion)),
            ("/metrics", self.metrics, described("Metrics of all replicas together, as Prometheus reads them.")),
        ):
            self.router.add_api_route(path, handler, methods=["GET"], **said)

    async def health(self) -> Response:
        """``GET /health``: 200 while this replica can decode."""
        try:
            self.service.check_health()
        except Exception as error:
            raise ApiError(503, f"This replica cannot decode: {error}.", kind="server_error") from error
        return JSONResponse({"status": "ok"})

    async def load(self) -> Response:
        """``GET /load``: requests that run or wait, in all replicas."""
        gauges = [report.gauges for report in (await self.service.totals()).replicas]
        return JSONResponse({"server_load": sum(one["running"] + one["waiting"] for one in gauges)})

    async def version(self) -> Response:
        """``GET /version``."""
        return JSONResponse({"version": osd.__version__})

    async def metrics(self) -> Response:
        """``GET /metrics``: Prometheus text, summed over all replicas."""
        settings, model = self.service.settings, self.service.model
        totals = await self.service.totals()
        # It takes milliseconds, in which others are answered.
        text = await asyncio.to_thread(exposition.render, totals, settings.domain, model.id)
        return Response(text, media_type=exposition.CONTENT_TYPE)


class ModelRoutes:
    """Handlers over one service, and what a model's name means in it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/v1/models", self.models, methods=["GET"], **described("The model, with each domain.", ModelList))
        add("/v1/models/{model:path}", self.model, methods=["GET"], **described("One of these.", ModelCard))

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``: the model, and the same with each of the caller's domains that has a drafter."""
        domains = await self._domains(caller_of(request).tenant)
        cards = [_card(self.service.model, domain) for domain in (None, *domains)]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request, model: str) -> Response:
        """``GET /v1/models/{id}``."""
        return JSONResponse(_card(self.service.model, await self.domain_of(model, caller_of(request).tenant)))

    async def domain_of(self, name: str | None, tenant: str) -> str | None:
        """The domain that a model's name ends with, None for the name alone.

        Raises:
            ApiError: 404, there is no such model, or no drafter for the domain.
        """
        model = self.service.model.id
        if name is None or name == model:
            return None
        domain = name.removeprefix(f"{model}:")
        if domain != name and domain in await self._domains(tenant):
            return domain
        message = (
            f"The model does not exist; this server serves '{model}', and '{model}:DOMAIN' for /v1/models' domains."
        )
        raise ApiError(404, message, param="model", code="model_not_found")

    async def _domains(self, tenant: str) -> list[str]:
        """What ``tenant`` calls the domains that have a drafter in some replica; "" is no tenant."""
        settings = self.service.settings
        known = {settings.domain} if settings.drafts else set[str]()
        for replica in (await self.service.totals()).replicas:
            known.update(replica.others)
        return sorted(name.removeprefix(f"{tenant}.") for name in known if tenant_of(name) == tenant)


def _card(model: Model, domain: str | None) -> dict[str, Any]:
    return {
        "id": model.id if domain is None else f"{model.id}:{domain}",
        "object": "model",
        "created": model.created,
        "owned_by": "osd",
        "root": model.root,
        "parent": None if domain is None else model.id,
        "max_model_len": model.context,
    }
