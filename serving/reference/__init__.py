"""Reference of the HTTP API: an OpenAPI document and an HTML page, without scripts or external resources."""

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
"""Paths that answer without a key, because they contain no data."""


def router(described: Sequence[APIRouter]) -> APIRouter:
    """Return the routes of the reference, which describes the routes of ``described``."""
    routes = APIRouter()

    @cache
    def api_document() -> dict[str, Any]:
        return document([route for api_router in described for route in api_router.routes], WITHOUT_KEY)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(api_document(), headers=_HEADERS)

    @routes.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(page(api_document()), headers=_HEADERS)

    @routes.get("/docs/style.css")
    async def style() -> Response:
        return Response(_STYLE, headers=_HEADERS, media_type="text/css")

    return routes
