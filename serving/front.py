"""ASGI middleware around Ray Serve's proxy: it filters request headers and turns Ray's errors into OpenAI errors.

Each proxy calls ``middlewares`` at its start, if the environment variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH is
``serving.front:middlewares``.
"""

from __future__ import annotations

import logging
import re
from functools import partial

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd.freed_memory import give_back_regularly
from serving.http import affinity
from serving.http import protocol as http_protocol
from serving.http.affinity import Affinity
from serving.http.carried_body import ClientMessages
from serving.http.content_length import is_longer
from serving.http.errors import ApiError, of_status
from serving.http.liveness import SILENCE_SECONDS, Silence
from serving.http.paths import template_of
from serving.http.sse import Reply
from serving.metrics.http_counts import ACTOR, COUNTS, Delivery

logger = logging.getLogger(__name__)

_FORWARDED = frozenset(
    {b"host", b"origin", b"authorization", b"content-type", b"content-length", b"x-request-id", b"traceparent"}
)
"""Headers that the service reads. Ray gives clients control over replicas and timeouts by other headers."""
_ROUTED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose requests are routed by the prefix of the prompt."""
_BODY_BYTES, _BODY_SECONDS = 1 << 20, 0.1
"""Size and time limits for reading a body to route by its prefix; other requests go to any replica."""
_DELIVERY = Delivery(COUNTS, ACTOR)
_BROKEN = "The replica ended before it answered completely. Try again."
_SILENT = f"The service received nothing from a replica for {SILENCE_SECONDS:.0f} seconds. Try again."
_VALID = {
    b"x-request-id": re.compile(rb"[!-~]{1,128}"),  # Ray decodes it, logs it and sends it back
    b"traceparent": re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
}
"""Valid values of forwarded headers."""


def middlewares() -> list[Middleware]:
    """Return the middleware for Ray Serve's proxy; install the HTTP protocol and start the threads of a proxy."""
    http_protocol.install()
    _DELIVERY.start()
    give_back_regularly()
    return [Middleware(Front)]


class Front:
    """ASGI middleware that forwards only ``_FORWARDED`` headers and ends every answer in OpenAI's format."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an HTTP request; close a websocket."""
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        reply = Reply(scope, receive, partial(_send_and_count, template_of(scope["path"]), send))
        messages, silence = ClientMessages(receive), Silence()
        try:
            headers = list(filter(_is_forwarded, scope["headers"]))
            if _is_routed_by_body(scope) and (body := await messages.body(_BODY_BYTES, _BODY_SECONDS)):
                key = dict(headers).get(b"authorization", b"")
                headers.append((affinity.HEADER, str(Affinity.of(body, key)).encode()))
            forwarded = await messages.carry({**scope, "headers": headers})
            forward = partial(silence.heard, partial(_send_openai, reply))
            async with silence.limit:
                await self.app(forwarded, messages.receive, forward)
        except Exception:
            if not silence.is_over_limit:
                logger.exception("the proxy failed")
                return await reply.fail(of_status(500))
        finally:
            messages.close()
        # Ray sends nothing more if the replica died or the client disconnected; such a client does not read this.
        reason = _SILENT if silence.is_over_limit else _BROKEN
        broken = ApiError(503, reason, kind="server_error", headers={"Retry-After": "1"})
        await reply.fail(of_status(499) if messages.disconnected else broken)


def _is_routed_by_body(scope: Scope) -> bool:
    """Return whether to read the body of a request to choose its replica."""
    headers = dict(scope["headers"])
    # With an Expect header the client waits for the replica before it sends the body.
    if scope["path"] not in _ROUTED_PATHS or b"expect" in headers:
        return False
    length = headers.get(b"content-length", b"0").decode("latin-1")
    return length.isdecimal() and not is_longer(length, _BODY_BYTES)


async def _send_and_count(template: str, send: Send, message: Message) -> None:
    """Send a message, and count it if it starts a response."""
    if message["type"] == "http.response.start":
        COUNTS[template, message["status"]] += 1
    await send(message)


def _is_forwarded(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name in _FORWARDED and (name not in _VALID or _VALID[name].fullmatch(value) is not None)


async def _send_openai(reply: Reply, message: Message) -> None:
    """Send a message of Ray's proxy, or an OpenAI error in place of Ray's error."""
    if message["type"] == "http.response.start":
        headers = Headers(raw=list(message["headers"]))
        # Errors of the service are JSON or HTML. Ray's errors are plain text, with or without a content type.
        if message["status"] >= 400 and headers.get("content-type", "text/plain").startswith("text/plain"):
            # Ray answers 404 only before the application is deployed, or after it was deleted.
            status = 503 if message["status"] == 404 else message["status"]
            other_headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
            return await reply.fail(of_status(status, other_headers))
    await reply.send(message)
