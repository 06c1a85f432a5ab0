"""Routes under ``/admin``: the actions of ``osd drafters`` and ``osd traces``, for keys that may administer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from osd.admin import AdminError, ConflictError, NotFoundError
from osd.admin.audit import Actor
from osd.admin.purging import purge_request
from osd.admin.rollouts import Listing, RolloutMove, Rollouts, listings
from osd.config import FULL_DOMAIN
from serving.access.keys import caller_of
from serving.dashboard.data import rollout_json, version_json
from serving.http.body import Body
from serving.http.errors import ApiError
from serving.http.limits import Arrivals
from serving.monitored import Monitored
from serving.reference.document import described
from serving.reference.shapes import DrafterDomains, Purged

_STATUS: dict[type[AdminError], tuple[int, str]] = {NotFoundError: (404, "not_found"), ConflictError: (409, "conflict")}

_Kind = TypeVar("_Kind")
_MOST_ARRIVING = 8  # requests whose bodies are being received


class OfDomain(Body):
    """Domain of the drafters, by default the domain of the service. Domains of tenants are ``TENANT.DOMAIN``."""

    domain: str | None = Field(None, pattern=FULL_DOMAIN)


class OfVersion(OfDomain):
    """Domain and version; the default version depends on the action."""

    version: int | None = Field(None, ge=1)


class OfRequest(Body):
    """Request, named by the id of its response."""

    request: str = Field(min_length=1, max_length=200)


class AdminRoutes:
    """Handlers of the administration; the audit log records each action with the key and the client's address."""

    def __init__(self, service: Monitored) -> None:
        self.service = service
        serving = service.settings.serving
        self._arrivals = Arrivals(serving, _MOST_ARRIVING, serving.max_body_bytes)
        self.router = APIRouter(prefix="/admin")
        add = self.router.add_api_route
        listed = described("List the drafter versions of each domain.", DrafterDomains)
        add("/drafters", self.drafters, methods=["GET"], **listed)
        for action, schema, summary in (
            ("promote", OfDomain, "Promote the canary to stable."),
            ("rollback", OfVersion, "Return to an earlier version."),
            ("pin", OfVersion, "Pin a version, so that the trainer does not change it."),
            ("unpin", OfDomain, "Allow the trainer to change the version again."),
        ):
            move = self._mover(action, schema)
            add(f"/drafters/{action}", move, methods=["POST"], name=action, **described(summary, RolloutMove, schema))
        purge = described("Delete all traces of a request.", Purged, OfRequest)
        add("/traces/purge", self.purge, methods=["POST"], **purge)

    async def drafters(self) -> Response:
        """Handle ``GET /admin/drafters``: list the versions of every domain."""
        domains = await _run(lambda: listings(self.service.settings, self.service.redis_url))
        return JSONResponse({"domains": [_domain(listing) for listing in domains]})

    def _mover(self, action: str, schema: type[OfDomain]) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of ``POST /admin/drafters/ACTION``, which calls the method ``action`` of ``Rollouts``."""

        async def move(request: Request) -> Response:
            async with self._arrivals.body(request, schema) as body:
                arguments = {**dict(body), "domain": body.domain or self.service.settings.domain}

            def moved() -> RolloutMove:
                with closing(Rollouts(self.service.settings, self.service.redis_url)) as rollouts:
                    return getattr(rollouts, action)(_actor(request), **arguments)

            return JSONResponse(asdict(await _run(moved)))

        return move

    async def purge(self, request: Request) -> Response:
        """Handle ``POST /admin/traces/purge``: delete a request and wait until all processes have deleted it."""
        service = self.service
        async with self._arrivals.body(request, OfRequest) as body:
            name = body.request
        removed = await _run(lambda: purge_request(service.settings, service.redis_url, _actor(request), name))
        return JSONResponse({"request": name, **asdict(removed)})


async def _run(action: Callable[[], _Kind]) -> _Kind:
    """Run an action in another thread; an ``AdminError`` becomes an ``ApiError``."""
    try:
        return await asyncio.to_thread(action)
    except AdminError as error:
        status, code = _STATUS.get(type(error), (503, "unavailable"))
        kind = "server_error" if status == 503 else "invalid_request_error"
        raise ApiError(status, f"{str(error)[:1].upper()}{str(error)[1:]}.", kind=kind, code=code) from error


def _actor(request: Request) -> Actor:
    key = caller_of(request).key
    assert key is not None  # noqa: S101  KeyGuard requires a key for /admin
    return Actor(f"key {key.name}", request.client.host if request.client else "unknown")


def _domain(listing: Listing) -> dict[str, Any]:
    versions = [{**version_json(version), "removed": version.removed} for version in listing.versions]
    return {"domain": listing.domain, **rollout_json(listing.rollout), "versions": versions}
