"""What stands before Ray Serve's proxy: it lets nothing in that Ray would act on, and ends what Ray gives up.

Each proxy calls ``middlewares`` as it starts, where the environment variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
is ``serving.front:middlewares``.
"""

from __future__ import annotations

import logging
import re
from functools import partial

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http import affinity
from serving.http import protocol as http_protocol
from serving.http.affinity import Affinity
from serving.http.carried_body import ClientMessages
from serving.http.errors import ApiError, of_status
from serving.http.paths import template_of
from serving.http.sse import Reply
from serving.metrics.http_counts import COUNTS, Delivery
from serving.metrics.replicas import ACTOR

logger = logging.getLogger(__name__)

_READ = frozenset(
    {b"host", b"origin", b"authorization", b"content-type", b"content-length", b"x-request-id", b"traceparent"}
)
"""Headers that the service reads. By others Ray lets clients choose replicas and timeouts, and stay when they left."""
_PROMPTED = frozenset({"/v1/chat/completions", "/v1/completions"})
"""What is asked of the replica that has read how the prompt begins."""
_BODY_BYTES, _BODY_SECONDS = 1 << 20, 0.1
"""A body is looked at whole; a larger one, and one that takes longer, goes to any replica."""
_DELIVERY = Delivery(COUNTS, ACTOR)
_BROKEN = "The replica ended before its answer did. Try again."
_VALID = {
    b"x-request-id": re.compile(rb"[!-~]{1,128}"),  # Ray decodes it, logs it and sends it back
    b"traceparent": re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
}
"""What of some of them is passed on."""


def middlewares() -> list[Middleware]:
    """What Ray Serve's proxy puts around itself; it reads HTTP by our protocol from then on."""
    http_protocol.install()
    _DELIVERY.start()
    return [Middleware(Front)]


class Front:
    """ASGI middleware: passes on the headers that the service reads, and ends every answer in OpenAI's shape."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may go on; nothing here is a websocket."""
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        reply = Reply(scope, receive, partial(_counted, template_of(scope["path"]), send))
        messages = ClientMessages(receive)
        try:
            headers = list(filter(_passes, scope["headers"]))
            if _is_looked_at(scope) and (body := await messages.body(_BODY_BYTES, _BODY_SECONDS)):
                key = dict(headers).get(b"authorization", b"")
                headers.append((affinity.HEADER, str(Affinity.of(body, key)).encode()))
            read = await messages.carry({**scope, "headers": headers})
            await self.app(read, messages.receive, partial(_reword, reply))
        except Exception:
            logger.exception("the proxy failed")
            return await reply.fail(of_status(500))
        finally:
            messages.close()
        # Ray says nothing, or nothing more, where the replica has gone or the client has, who does not read this.
        broken = ApiError(503, _BROKEN, kind="server_error", headers={"Retry-After": "1"})
        await reply.fail(of_status(499) if messages.left else broken)


def _is_looked_at(scope: Scope) -> bool:
    """Whether a body comes that says which replica is to be asked."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    small = length.isdigit() and int(length) <= _BODY_BYTES
    # Who asks whether to send it is told by the replica.
    return scope["path"] in _PROMPTED and small and b"expect" not in headers


async def _counted(template: str, send: Send, message: Message) -> None:
    """Send a message, and count it where it begins an answer."""
    if message["type"] == "http.response.start":
        COUNTS[template, message["status"]] += 1
    await send(message)


def _passes(header: tuple[bytes, bytes]) -> bool:
    name, value = header
    return name in _READ and (name not in _VALID or _VALID[name].fullmatch(value) is not None)


async def _reword(reply: Reply, message: Message) -> None:
    """Send a message of Ray's proxy, or in place of an error in its own words another one."""
    if message["type"] == "http.response.start":
        headers = Headers(raw=list(message["headers"]))
        # The service's own errors are JSON, and a page; Ray's are plain text, called so or not.
        if message["status"] >= 400 and headers.get("content-type", "text/plain").startswith("text/plain"):
            # No path is unknown to Ray once there is an application: that has not come yet, or has gone.
            status = 503 if message["status"] == 404 else message["status"]
            kept = {name: value for name, value in headers.items() if not name.startswith("content-")}
            return await reply.fail(of_status(status, kept))
    await reply.send(message)
