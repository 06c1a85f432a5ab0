"""The paths that tell of the server itself: health, load, version and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

import osd
from serving import prometheus
from serving.errors import ApiError
from serving.service import Service


class ServerRoutes:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/health", self.health, methods=["GET"])
        add("/load", self.load, methods=["GET"])
        add("/version", self.version, methods=["GET"])
        add("/metrics", self.metrics, methods=["GET"])

    async def health(self) -> Response:
        """``GET /health``: 200 while this replica can decode."""
        try:
            self.service.check_health()
        except Exception as error:
            raise ApiError(503, f"This replica cannot decode: {error}.", kind="server_error") from error
        return JSONResponse({"status": "ok"})

    async def load(self) -> Response:
        """``GET /load``: requests that run or wait, in all replicas."""
        loads = [replica.load for replica in (await self.service.totals()).replicas]
        return JSONResponse({"server_load": sum(load.running + load.waiting for load in loads)})

    async def version(self) -> Response:
        """``GET /version``."""
        return JSONResponse({"version": osd.__version__})

    async def metrics(self) -> Response:
        """``GET /metrics``: Prometheus text, summed over all replicas."""
        settings, model = self.service.settings, self.service.model
        text = prometheus.render(await self.service.totals(), settings.domain, model.id)
        return Response(text, media_type=prometheus.CONTENT_TYPE)
