"""What stands before Ray Serve's proxy: it lets nothing in that Ray would act on, and gives Ray's refusals our shape.

Each proxy calls ``middlewares`` as it starts, where the environment variable ``VARIABLE`` is ``IMPORT_PATH``.
"""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving import http_protocol
from serving.errors import of_status

logger = logging.getLogger(__name__)

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
IMPORT_PATH = "serving.front:middlewares"

_READ = frozenset({b"host", b"origin", b"authorization", b"content-type", b"content-length", b"x-request-id"})
"""Headers that the service reads. By others Ray lets clients choose replicas and timeouts, and stay when they left."""
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")  # Ray decodes it, logs it and sends it back


def middlewares() -> list[Middleware]:
    """What Ray Serve's proxy puts around itself; it reads HTTP by our protocol from then on."""
    http_protocol.install()
    return [Middleware(Front)]


class Front:
    """ASGI middleware: passes on the headers that the service reads, and no errors but in OpenAI's shape."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may go on; nothing here is a websocket."""
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        answer = _Answer(scope, receive, send)
        try:
            await self.app({**scope, "headers": list(filter(_passes, scope["headers"]))}, receive, answer.send)
        except Exception:
            if answer.begun:
                raise
            logger.exception("the proxy failed")
        if not answer.begun:
            await answer.replace(500, [])


def _passes(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name in _READ and (name != b"x-request-id" or _REQUEST_ID.fullmatch(value) is not None)


class _Answer:
    """Sends an answer, or in place of an error that Ray words another one."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.begun = self._replaced = False

    async def send(self, message: Message) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            # The service's own errors are JSON, and a page; Ray's are plain text, called so or not.
            kind = Headers(raw=list(message["headers"])).get("content-type", "text/plain")
            if kind.startswith("text/plain") and message["status"] >= 400:
                await self.replace(message["status"], message["headers"])
            self.begun = True
        if not self._replaced:
            await self._send(message)

    async def replace(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send an error of this status in OpenAI's shape, with those of ``headers`` that do not describe a body."""
        self._replaced = True
        kept = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        kept = {name: value for name, value in kept.items() if not name.startswith("content-")}
        await of_status(status, kept).response()(self._scope, self._receive, self._send)
