"""Dashboard: static files, the event stream that the pages read, and the same data as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from redis.exceptions import RedisError

from serving.access.keys import caller_of
from serving.dashboard.stream import Viewers
from serving.http.errors import ApiError
from serving.http.paths import STREAM
from serving.http.sse import EventStream
from serving.metrics.history import HISTORY_SECONDS

if TYPE_CHECKING:
    from serving.monitored import Monitored  # imports serving.dashboard

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

_PAGE = "/dashboard"

OPEN_PATHS = frozenset({"/", _PAGE, *(f"{_PAGE}/{name}" for name in _ASSETS)})
"""Paths that answer without a key: static files, which hold no data, and the redirect to the page.

Without a key the page has status 401.
"""


def router(service: Monitored) -> APIRouter:
    """Return the routes under ``/dashboard``, and the redirect from ``/`` to the page."""
    routes = APIRouter()
    files = {name: (_FOLDER / name).read_bytes() for name in ("index.html", *_ASSETS)}
    viewers = Viewers(service)

    def file(name: str, status: int = 200) -> Response:
        return Response(files[name], status, _HEADERS, media_type=_TYPES[Path(name).suffix])

    @routes.get("/")
    async def root() -> Response:
        return RedirectResponse(_PAGE)

    @routes.get(_PAGE)
    async def page(request: Request) -> Response:
        return file("index.html", 200 if caller_of(request).may("watch") else 401)

    @routes.get(f"{_PAGE}/data")
    async def data(request: Request) -> Response:
        history = asdict(await service.dashboard_bins(_seconds(request), None))
        state = await service.dashboard_state()
        return JSONResponse({**state, "history": history}, headers={"Cache-Control": "no-store"})

    @routes.get(f"{_PAGE}/versions")
    async def versions(request: Request) -> Response:
        try:
            content = await service.dashboard_versions(request.query_params.get("domain", service.settings.domain))
        except ValueError:
            raise ApiError(404, "This domain does not exist.", param="domain", code="not_found") from None
        except (RedisError, OSError):
            message = "The versions of this domain cannot be read: Redis or the registry does not answer. Try again."
            raise ApiError(503, message, kind="server_error", code="unavailable") from None
        return JSONResponse(content, headers={"Cache-Control": "no-store"})

    @routes.get(STREAM)
    async def stream(request: Request) -> Response:
        seconds = _seconds(request)
        viewers.enter()
        return EventStream(viewers.follow(seconds, request.headers.get("last-event-id")), viewers.leave)

    @routes.get(_PAGE + "/{name:path}")
    async def asset(name: str) -> Response:
        if not name:
            return RedirectResponse(_PAGE)
        if name not in _ASSETS:
            raise ApiError(404, "This path does not exist.")
        return file(name)

    return routes


def _seconds(request: Request) -> int:
    """Return the window in seconds that a request asks for.

    Raises:
        ApiError: 400; ``seconds`` is not a whole number in the allowed range.
    """
    text = request.query_params.get("seconds", "900")
    # int raises for texts of thousands of digits, so check the length first.
    if not (text.isdecimal() and len(text) < 10 and 60 <= int(text) <= HISTORY_SECONDS):
        raise ApiError(400, f"'seconds' must be a whole number from 60 to {HISTORY_SECONDS}.", param="seconds")
    return int(text)
