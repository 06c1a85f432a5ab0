"""The paths that tell of the server itself: health, load, version and metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

import osd
from serving.http.errors import ApiError
from serving.metrics import exposition
from serving.reference.document import described
from serving.reference.shapes import Health, ServerLoad, ServerVersion
from serving.service import Service


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
