"""The paths under ``/admin``: what ``osd drafters`` and ``osd traces`` do, over HTTP, for keys that may administer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from osd.admin import AdminError, Conflict, NotThere
from osd.admin.audit import Actor
from osd.admin.forgetting import forget
from osd.admin.rollouts import Listing, Moved, Rollouts, listings
from osd.config import FULL_DOMAIN
from serving.access.keys import caller_of
from serving.dashboard.data import rollout_of, version_of
from serving.http.body import Body
from serving.http.errors import ApiError
from serving.http.limits import Arrivals
from serving.reference.document import described
from serving.reference.shapes import DrafterDomains, Purged
from serving.service import Watched

_STATUS: dict[type[AdminError], tuple[int, str]] = {NotThere: (404, "not_found"), Conflict: (409, "conflict")}

_Kind = TypeVar("_Kind")
_AT_ONCE = 8  # requests whose bodies arrive


class OfDomain(Body):
    """Which domain's drafters; the service's own, where it is not said. A tenant's are ``TENANT.DOMAIN``."""

    domain: str | None = Field(None, pattern=FULL_DOMAIN)


class OfVersion(OfDomain):
    """And which version of them; what is meant without one each action says."""

    version: int | None = Field(None, ge=1)


class OfRequest(Body):
    """Which request: the id of the response."""

    request: str = Field(min_length=1, max_length=200)


class AdminRoutes:
    """Handlers over one service; each action is in the audit log with the name of the key and the client's address."""

    def __init__(self, service: Watched) -> None:
        self.service = service
        serving = service.settings.serving
        self._arrivals = Arrivals(serving, _AT_ONCE, serving.max_body_bytes)
        self.router = APIRouter(prefix="/admin")
        add = self.router.add_api_route
        add("/drafters", self.drafters, methods=["GET"], **described("The versions of each domain.", DrafterDomains))
        for action, schema, said in (
            ("promote", OfDomain, "End the trial of the canary."),
            ("rollback", OfVersion, "Serve an earlier version."),
            ("pin", OfVersion, "Keep a version in service."),
            ("unpin", OfDomain, "Let the trainer go on."),
        ):
            move = self._mover(action, schema)
            add(f"/drafters/{action}", move, methods=["POST"], name=action, **described(said, Moved, schema))
        add("/traces/purge", self.purge, methods=["POST"], **described("Forget a request.", Purged, OfRequest))

    async def drafters(self) -> Response:
        """``GET /admin/drafters``: the versions of every domain."""
        found = await _done(lambda: listings(self.service.settings, self.service.redis_url))
        return JSONResponse({"domains": [_domain(listing) for listing in found]})

    def _mover(self, action: str, schema: type[OfDomain]) -> Callable[[Request], Awaitable[Response]]:
        """``POST /admin/drafters/ACTION``: what the method of ``Rollouts`` with the name of the ``action`` does."""

        async def move(request: Request) -> Response:
            async with self._arrivals.body(request, schema) as body:
                which = {**dict(body), "domain": body.domain or self.service.settings.domain}

            def moved() -> Moved:
                with closing(Rollouts(self.service.settings, self.service.redis_url)) as rollouts:
                    return getattr(rollouts, action)(_actor(request), **which)

            return JSONResponse(asdict(await _done(moved)))

        return move

    async def purge(self, request: Request) -> Response:
        """``POST /admin/traces/purge``: forget a request; waits for whoever remembers it."""
        service = self.service
        async with self._arrivals.body(request, OfRequest) as body:
            name = body.request
        found = await _done(lambda: forget(service.settings, service.redis_url, _actor(request), name))
        return JSONResponse({"request": name, **asdict(found)})


async def _done(action: Callable[[], _Kind]) -> _Kind:
    """Act on another thread; what is refused is an answer."""
    try:
        return await asyncio.to_thread(action)
    except AdminError as error:
        status, code = _STATUS.get(type(error), (503, "unavailable"))
        kind = "server_error" if status == 503 else "invalid_request_error"
        raise ApiError(status, f"{str(error)[:1].upper()}{str(error)[1:]}.", kind=kind, code=code) from error


def _actor(request: Request) -> Actor:
    key = caller_of(request).key
    assert key is not None  # noqa: S101  nobody else comes here
    return Actor(f"key {key.name}", request.client.host if request.client else "unknown")


def _domain(listing: Listing) -> dict[str, Any]:
    versions = [{**version_of(one), "removed": one.removed} for one in listing.versions]
    return {"domain": listing.domain, **rollout_of(listing.rollout), "versions": versions}
