"""ASGI middleware that checks the host name, the right and the limits of each request."""

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
    """Return the host names that requests may use, in addition to loopback names; None allows every name."""
    if settings.allowed_hosts is not None:
        return frozenset(map(plain, settings.allowed_hosts))
    # On a loopback address, a foreign name in Host means DNS rebinding by a web page.
    if settings.api_key is None and settings.keys_file is None and is_loopback(plain(settings.host)):
        return frozenset({plain(settings.host)})
    return None


class HostGuard:
    """ASGI middleware that answers 403 unless ``Host`` and ``Origin`` are in ``names`` or are loopback names.

    ``/health`` answers under every name. Error messages refer the client to ``setting``.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str], setting: str = "serving.allowed_hosts") -> None:
        self.app, self.names, self._setting = app, names, setting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an allowed request, or send the error."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        hosts = [host_of(f"//{value}") for value in headers.getlist("host")]
        if len(hosts) != 1 or not self._is_allowed(hosts[0]):
            message = f"The 'Host' of this request is not a name of this server. {self._setting} lists the names."
        elif not all(self._is_allowed(host_of(value)) for value in headers.getlist("origin")):
            message = f"Pages of this 'Origin' may not use this server. {self._setting} lists the allowed names."
        else:
            return await self.app(scope, receive, send)
        return await ApiError(403, message, code="host_not_allowed").response()(scope, receive, send)

    def _is_allowed(self, name: str | None) -> bool:
        return name is not None and (name in self.names or is_loopback(name))


OPEN_PATHS = frozenset({"/health"})
"""Paths that answer without a key. ``KeyGuard`` adds the dashboard's static files, which hold no data."""

_WATCH_PATHS = frozenset({"/metrics", "/dashboard/data", "/dashboard/versions", STREAM})
_FORBIDDEN = {
    "generate": "This key may not generate: add the right 'generate' in serving.keys_file.",
    "watch": "This key may not watch: metrics and the dashboard need a key with the right 'watch' or 'administer'.",
    "administer": (
        "This key may not administer: use serving.admin_key, or a key of serving.keys_file with the right 'administer'."
    ),
}


def right_for(path: str) -> Right:
    """Return the right that a path needs: "generate" unless the path is for administration or monitoring."""
    if path == "/admin" or path.startswith("/admin/"):
        return "administer"
    return "watch" if path in _WATCH_PATHS else "generate"


class KeyGuard:
    """ASGI middleware that identifies the caller and checks the right of its key.

    It answers 401 if the path needs a key and the request has no valid key, and 403 if the key lacks the right.
    Otherwise it stores the ``Caller`` in the state of the scope. ``open_paths`` need no key.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: frozenset[str]) -> None:
        self.app, self.keyring, self.open = app, keyring, OPEN_PATHS | open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an allowed request, or send the error."""
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
        if right == "administer" and not self.keyring.has_administrator:
            message = "This server has no key that may administer: set serving.admin_key or serving.keys_file."
            return ApiError(403, message, code="forbidden")
        if caller.key is not None:
            return ApiError(403, _FORBIDDEN[right], code="forbidden")
        message = "This server needs its API key as 'Authorization: Bearer KEY'."
        if right == "administer":
            message = message.replace("API", "admin")
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class BudgetGuard:
    """ASGI middleware that enforces the limits of keys.

    It answers 429 if a limit is reached, and adds rate limit headers to every response for a limited key.
    """

    def __init__(self, app: ASGIApp, budgets: Budgets) -> None:
        self.app, self.budgets = app, budgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an allowed request, or send the error."""
        key = caller_of(Request(scope)).key if scope["type"] == "http" else None
        if key is None or not key.limits or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        try:
            limit_headers = await self.budgets.admit(key)
        except ApiError as error:
            return await error.response()(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(limit_headers)
            await send(message)

        return await self.app(scope, receive, send_with_headers)


_VALID_KEYS = "valid_keys.json"


class Access:
    """Keys of a service and the counts of their limits."""

    def __init__(self, settings: Settings, redis_url: str | None, on_refused_file: Callable[[str], None]) -> None:
        """Load the keys.

        Args:
            settings: settings of the service.
            redis_url: Redis that holds the counts for all replicas; None counts in this process only.
            on_refused_file: see ``Keyring``.

        Raises:
            osd.config.ConfigError: ``serving.keys_file`` is invalid, and no earlier content was valid.
        """
        self.keyring = Keyring(settings.serving, on_refused_file, settings.home_dir / _VALID_KEYS)
        self.budgets = Budgets(redis_url)

    def close(self) -> None:
        """Write the pending charges and close the connections."""
        self.budgets.close()
