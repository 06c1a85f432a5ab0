"""Server-sent events in OpenAI's format, and responses that report an error after they started."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serving.http.errors import ApiError, Disconnected

MEDIA_TYPE = "text/event-stream"

DONE = b"data: [DONE]\n\n"
"""Last event of every stream, also after an error."""


def event(data: dict[str, Any]) -> bytes:
    """Encode an unnamed event with the JSON of ``data``."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named(kind: str, id: str, data: bytes) -> bytes:
    """Encode an event with a name and an id; clients send the last id as ``Last-Event-ID`` when they reconnect."""
    return b"event: %b\nid: %b\ndata: %b\n\n" % (kind.encode(), id.encode(), data)


def retry(milliseconds: int) -> bytes:
    """Encode the delay before a client reconnects."""
    return b"retry: %d\n\n" % milliseconds


class EventStream(Response):
    """Response that sends events as they arrive and always calls ``close`` at the end.

    Starlette's ``StreamingResponse`` would consume the disconnect message that the generation waits for.
    """

    media_type = MEDIA_TYPE

    def __init__(self, content: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.content, self.close = content, close
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client disconnects."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self.content:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (Disconnected, OSError):
            return
        finally:
            self.close()


class Reply:
    """Response of an application, which ends with an error in OpenAI's format if it fails.

    The status and headers are held back until the body starts, so that an earlier failure has its own status.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._head: Message | None = None
        self._begun = self._ended = False
        self._streams = self._in_event = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message; messages after the end are dropped."""
        if self._ended:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not self._begun and self._head is not None:
            self._begun = True
            kind = Headers(raw=list(self._head["headers"])).get("content-type", "")
            self._streams = kind.startswith(MEDIA_TYPE)
            await self._send(self._head)
        self._ended = not message.get("more_body", False)
        if body := message.get("body", b""):
            self._in_event = not body.endswith(b"\n\n")
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End the response with an error, unless it has ended.

        Before the body starts, the error is the response. In an event stream, the error is sent as an event and the
        stream ends. Any other body stays incomplete, and the HTTP server closes the connection.
        """
        if self._ended:
            return
        self._ended = True
        if not self._begun:
            await error.response()(self._scope, self._receive, self._send)
        elif self._streams:
            end = b"\n\n" * self._in_event + event(error.body) + DONE
            await self._send({"type": "http.response.body", "body": end, "more_body": False})
