"""Guards of the service: a name under which it may be asked, a key with the right that a path needs, and its limits."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd.addresses import host_of, is_loopback, plain
from osd.config import ServingSettings, Settings
from serving.access.budgets import Budgets
from serving.access.keys import STATE, Caller, Right, bearer_of, caller_of, client_of
from serving.access.keys_file import Keyring
from serving.http.errors import ApiError
from serving.http.paths import STREAM


def allowed_hosts(settings: ServingSettings) -> frozenset[str] | None:
    """The names beside those of loopback under which the service may be asked; None for any."""
    if settings.allowed_hosts is not None:
        return frozenset(map(plain, settings.allowed_hosts))
    # Where nobody else can connect, another name in Host is a page's that had it resolved to this machine.
    if settings.api_key is None and settings.keys_file is None and is_loopback(plain(settings.host)):
        return frozenset({plain(settings.host)})
    return None


class HostGuard:
    """ASGI middleware: 403 for a ``Host`` or an ``Origin`` that is neither of ``names``, by a setting, nor loopback.

    ``/health`` answers under every name.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str], setting: str = "serving.allowed_hosts") -> None:
        self.app, self.names, self._setting = app, names, setting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may go on."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        hosts = [host_of(f"//{value}") for value in headers.getlist("host")]
        if len(hosts) != 1 or not self._known(hosts[0]):
            refused = f"This 'Host' is not a name of this server; {self._setting} says which are."
        elif not all(self._known(host_of(value)) for value in headers.getlist("origin")):
            refused = f"Pages of this 'Origin' may not ask this server; {self._setting} says which may."
        else:
            return await self.app(scope, receive, send)
        return await ApiError(403, refused, code="host_not_allowed").response()(scope, receive, send)

    def _known(self, name: str | None) -> bool:
        return name is not None and (name in self.names or is_loopback(name))


OPEN_PATHS = frozenset({"/health"})
"""Paths that answer without a key. The dashboard's own files are open too: they hold no data."""

_WATCHED = frozenset({"/metrics", "/dashboard/data", "/dashboard/versions", STREAM})
_REFUSED = {
    "generate": "This key may not generate.",
    "watch": "This key may not watch: metrics and the dashboard need one that may watch or administer.",
    "administer": "This key may not administer: serving.admin_key may, or a key of serving.keys_file that says so.",
}


def right_for(path: str) -> Right:
    """What a path needs."""
    if path == "/admin" or path.startswith("/admin/"):
        return "administer"
    return "watch" if path in _WATCHED else "generate"


class KeyGuard:
    """ASGI middleware: 401 without a key that is asked for, 403 with one that may not, else the routes know the caller.

    ``open_paths`` answer without one.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: frozenset[str]) -> None:
        self.app, self.keyring, self.open = app, keyring, OPEN_PATHS | open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may go on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        secret = bearer_of(Headers(scope=scope))
        key = await self.keyring.find(secret)
        caller = Caller(key, client_of(key, secret), self.keyring.free)
        right = right_for(scope["path"])
        if scope["path"] in self.open or caller.may(right):
            return await self.app({**scope, "state": {**scope.get("state", {}), STATE: caller}}, receive, send)
        return await self._refusal(caller, right).response()(scope, receive, send)

    def _refusal(self, caller: Caller, right: Right) -> ApiError:
        if right == "administer" and not self.keyring.administered:
            message = "Nobody may administer this server over HTTP: set serving.admin_key or serving.keys_file."
            return ApiError(403, message, code="forbidden")
        if caller.key is not None:
            return ApiError(403, _REFUSED[right], code="forbidden")
        return ApiError(
            401,
            "This server needs its API key as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class BudgetGuard:
    """ASGI middleware: 429 for a key that has used what it may, and what is left on every answer of a limited key."""

    def __init__(self, app: ASGIApp, budgets: Budgets) -> None:
        self.app, self.budgets = app, budgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may go on."""
        key = caller_of(Request(scope)).key if scope["type"] == "http" else None
        if key is None or not key.limits or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        try:
            left = await self.budgets.admit(key)
        except ApiError as error:
            return await error.response()(scope, receive, send)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(left)
            await send(message)

        return await self.app(scope, receive, told)


class Access:
    """The keys and what they have used; ``close`` charges what is left.

    Raises:
        osd.config.ConfigError: ``serving.keys_file`` is refused.
    """

    def __init__(self, settings: Settings, redis_url: str | None, refused: Callable[[str], None]) -> None:
        """Count over all replicas that have the Redis of ``redis_url``; ``refused``: see ``Keyring``."""
        self.keyring = Keyring(settings.serving, refused)
        self.budgets = Budgets(redis_url)

    def close(self) -> None:
        """Close the connections."""
        self.budgets.close()
