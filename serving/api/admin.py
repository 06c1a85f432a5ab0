"""The paths under ``/admin``: what ``osd drafters`` and ``osd traces`` do, over HTTP, for keys that may administer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from osd.admin import AdminError, Conflict, NotThere
from osd.admin.audit import Actor
from osd.admin.forgetting import forget
from osd.admin.listing import Listing, listings
from osd.admin.rollouts import Moved, Rollouts
from osd.config import FULL_DOMAIN
from serving.access.caller import caller_of
from serving.dashboard.domain_versions import rollout_of, version_of
from serving.http.body import Body
from serving.http.errors import ApiError
from serving.http.limits import Arrivals, read_body
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
        self.arrivals = Arrivals(_AT_ONCE, service.settings.serving.max_body_bytes)
        self.router = APIRouter(prefix="/admin")
        add = self.router.add_api_route
        add("/drafters", self.drafters, methods=["GET"], **described("The versions of each domain.", DrafterDomains))
        for path, handler, said in (
            ("/drafters/promote", self.promote, described("End the trial of the canary.", Moved, OfDomain)),
            ("/drafters/rollback", self.rollback, described("Serve an earlier version.", Moved, OfVersion)),
            ("/drafters/pin", self.pin, described("Keep a version in service.", Moved, OfVersion)),
            ("/drafters/unpin", self.unpin, described("Let the trainer go on.", Moved, OfDomain)),
            ("/traces/purge", self.purge, described("Forget a request.", Purged, OfRequest)),
        ):
            add(path, handler, methods=["POST"], **said)

    async def drafters(self) -> Response:
        """``GET /admin/drafters``: the versions of every domain."""
        found = await _done(lambda: listings(self.service.settings, self.service.redis_url))
        return JSONResponse({"domains": [_domain(listing) for listing in found]})

    async def promote(self, request: Request) -> Response:
        """``POST /admin/drafters/promote``: end the trial of the canary, it serves every request."""
        domain = self._domain(await self._read(request, OfDomain))
        return await self._move(lambda rollouts: rollouts.promote(_actor(request), domain))

    async def rollback(self, request: Request) -> Response:
        """``POST /admin/drafters/rollback``: to ``version``, else to the parent of the one in service."""
        body = await self._read(request, OfVersion)
        return await self._move(lambda rollouts: rollouts.rollback(_actor(request), self._domain(body), body.version))

    async def pin(self, request: Request) -> Response:
        """``POST /admin/drafters/pin``: ``version``, else the one in service, stays in service."""
        body = await self._read(request, OfVersion)
        return await self._move(lambda rollouts: rollouts.pin(_actor(request), self._domain(body), body.version))

    async def unpin(self, request: Request) -> Response:
        """``POST /admin/drafters/unpin``: the trainer may put new versions in service again."""
        domain = self._domain(await self._read(request, OfDomain))
        return await self._move(lambda rollouts: rollouts.unpin(_actor(request), domain))

    async def purge(self, request: Request) -> Response:
        """``POST /admin/traces/purge``: forget a request; waits for whoever remembers it."""
        asked, service = await self._read(request, OfRequest), self.service
        found = await _done(lambda: forget(service.settings, service.redis_url, _actor(request), asked.request))
        return JSONResponse({"request": asked.request, **asdict(found)})

    async def _read(self, request: Request, schema: type[_AnyBody]) -> _AnyBody:
        with self.arrivals.one() as arrived:
            return await read_body(request, schema, self.service.settings.serving, arrived)

    def _domain(self, body: OfDomain) -> str:
        return body.domain or self.service.settings.domain

    async def _move(self, move: Callable[[Rollouts], Moved]) -> Response:
        def moved() -> Moved:
            with closing(Rollouts(self.service.settings, self.service.redis_url)) as rollouts:
                return move(rollouts)

        return JSONResponse(asdict(await _done(moved)))


_AnyBody = TypeVar("_AnyBody", bound=Body)


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
