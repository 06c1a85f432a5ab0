"""Who a request is addressed to: a service without a key answers no page that a browser on its machine has opened."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from osd.addresses import host_of, is_loopback, plain
from osd.config import ServingSettings
from serving.access.guard import OPEN_PATHS
from serving.http.errors import ApiError


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
