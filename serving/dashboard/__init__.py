"""The dashboard: a page of static files and the JSON that it reads every other second."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from serving.access.caller import caller_of
from serving.errors import ApiError
from serving.replica_metrics import HISTORY_SECONDS
from serving.service import Service

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_ASSETS = (
    "app.js",
    "charts.js",
    "panels.js",
    "style.css",
    "icon.svg",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

OPEN_PATHS = frozenset({"/dashboard", *(f"/dashboard/{name}" for name in _ASSETS)})
"""Answer without the key, or nobody could type it in: program files without data. The page itself says 401 then."""


def router(service: Service) -> APIRouter:
    """The paths under ``/dashboard``."""
    routes = APIRouter(prefix="/dashboard")
    files = {name: (_FOLDER / name).read_bytes() for name in ("index.html", *_ASSETS)}

    def file(name: str, status: int = 200) -> Response:
        return Response(files[name], status, _HEADERS, media_type=_TYPES[Path(name).suffix])

    @routes.get("")
    async def page(request: Request) -> Response:
        return file("index.html", 200 if caller_of(request).may("watch") else 401)

    @routes.get("/data")
    async def data(request: Request) -> Response:
        asked = request.query_params.get("seconds", "900")
        # Python refuses to read a number of thousands of digits.
        if not (asked.isdecimal() and len(asked) < 10 and 60 <= int(asked) <= HISTORY_SECONDS):
            raise ApiError(400, f"'seconds' must be a whole number from 60 to {HISTORY_SECONDS}.", param="seconds")
        return JSONResponse(await service.dashboard(int(asked)), headers={"Cache-Control": "no-store"})

    @routes.get("/{name:path}")
    async def asset(name: str) -> Response:
        if not name:
            return RedirectResponse("/dashboard")
        if name not in _ASSETS:
            raise ApiError(404, "There is no such path.")
        return file(name)

    return routes
