"""The reference of the HTTP API: a document for programs and a page for people, without a script or a CDN."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response

from serving.access.guard import OPEN_PATHS as WITHOUT_KEY
from serving.reference.document import document, page

_STYLE = (Path(__file__).parent / "style.css").read_bytes()
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

OPEN_PATHS = frozenset({"/openapi.json", "/docs", "/docs/style.css"})
"""Answer without a key: they hold no data."""


def router(described: Sequence[APIRouter]) -> APIRouter:
    """The paths of the reference of what the routers ``described`` have."""
    routes = APIRouter()

    @cache
    def told() -> dict[str, Any]:
        return document([route for one in described for route in one.routes], WITHOUT_KEY)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(told(), headers=_HEADERS)

    @routes.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(page(told()), headers=_HEADERS)

    @routes.get("/docs/style.css")
    async def style() -> Response:
        return Response(_STYLE, headers=_HEADERS, media_type="text/css")

    return routes
