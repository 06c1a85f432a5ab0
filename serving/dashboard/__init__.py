"""The dashboard: pages of static files, the stream that they follow, and the same as JSON for whoever asks once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from redis.exceptions import RedisError

from serving.access.keys import caller_of
from serving.dashboard.stream import Viewers
from serving.http.errors import ApiError
from serving.http.sse import EventStream
from serving.metrics.history import HISTORY_SECONDS
from serving.service import Watched

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_ASSETS = tuple(
    sorted(
        str(path.relative_to(_FOLDER))
        for path in _FOLDER.rglob("*")
        if path.suffix in _TYPES and path.name != "index.html"
    )
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

OPEN_PATHS = frozenset({"/dashboard", *(f"/dashboard/{name}" for name in _ASSETS)})
"""Answer without the key, or nobody could type it in: program files without data. The page itself says 401 then."""


def router(service: Watched) -> APIRouter:
    """The paths under ``/dashboard``."""
    routes = APIRouter(prefix="/dashboard")
    files = {name: (_FOLDER / name).read_bytes() for name in ("index.html", *_ASSETS)}
    viewers = Viewers(service)

    def file(name: str, status: int = 200) -> Response:
        return Response(files[name], status, _HEADERS, media_type=_TYPES[Path(name).suffix])

    @routes.get("")
    async def page(request: Request) -> Response:
        return file("index.html", 200 if caller_of(request).may("watch") else 401)

    @routes.get("/data")
    async def data(request: Request) -> Response:
        history = asdict(await service.dashboard_bins(_seconds(request), None))
        state = await service.dashboard_state()
        return JSONResponse({**state, "history": history}, headers={"Cache-Control": "no-store"})

    @routes.get("/versions")
    async def versions(request: Request) -> Response:
        try:
            found = await service.dashboard_versions(request.query_params.get("domain", service.settings.domain))
        except ValueError:
            raise ApiError(404, "There is no such domain.", param="domain", code="not_found") from None
        except (RedisError, OSError):
            message = "The versions of this domain cannot be read now: Redis or the registry does not answer."
            raise ApiError(503, message, kind="server_error", code="unavailable") from None
        return JSONResponse(found, headers={"Cache-Control": "no-store"})

    @routes.get("/stream")
    async def stream(request: Request) -> Response:
        seconds = _seconds(request)
        viewers.enter()
        return EventStream(viewers.follow(seconds, request.headers.get("last-event-id")), viewers.leave)

    @routes.get("/{name:path}")
    async def asset(name: str) -> Response:
        if not name:
            return RedirectResponse("/dashboard")
        if name not in _ASSETS:
            raise ApiError(404, "There is no such path.")
        return file(name)

    return routes


def _seconds(request: Request) -> int:
    """The window that a request asks for.

    Raises:
        ApiError: 400; it is none.
    """
    asked = request.query_params.get("seconds", "900")
    # Python refuses to read a number of thousands of digits.
    if not (asked.isdecimal() and len(asked) < 10 and 60 <= int(asked) <= HISTORY_SECONDS):
        raise ApiError(400, f"'seconds' must be a whole number from 60 to {HISTORY_SECONDS}.", param="seconds")
    return int(asked)
