"""Server-sent events as OpenAI's clients read them, and answers that can fail at any moment."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serving.api.generation import Disconnected
from serving.http.errors import ApiError

MEDIA_TYPE = "text/event-stream"

DONE = b"data: [DONE]\n\n"
"""Ends every stream, whole or not."""


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named(kind: str, id: str, data: bytes) -> bytes:
    """One event of a ``kind`` of its own; whoever lost the connection says the last ``id`` as ``Last-Event-ID``."""
    return b"event: %b\nid: %b\ndata: %b\n\n" % (kind.encode(), id.encode(), data)


def retry(milliseconds: int) -> bytes:
    """How long a client waits before it connects again."""
    return b"retry: %d\n\n" % milliseconds


class EventStream(Response):
    """Sends events as they come and calls ``close`` in the end, however it ends.

    Starlette's own streaming response would compete with the generation for the disconnect message.
    """

    media_type = MEDIA_TYPE

    def __init__(self, content: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.content, self.close = content, close
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop where the client left."""
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
    """Passes an answer on, and ends it in OpenAI's shape where it fails.

    Its head waits for its body: until then a failure has a status of its own.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._head: Message | None = None
        self._begun = self._ended = False
        self._streams = self._in_event = False

    async def send(self, message: Message) -> None:
        """See ASGI; what comes after the end is dropped."""
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
        """End what has not ended: as this error, or with an event that says so and the last one of a stream.

        The rest of any other body that has begun stays away, and whoever serves HTTP closes the connection.
        """
        if self._ended:
            return
        self._ended = True
        if not self._begun:
            await error.response()(self._scope, self._receive, self._send)
        elif self._streams:
            end = b"\n\n" * self._in_event + event(error.body) + DONE
            await self._send({"type": "http.response.body", "body": end, "more_body": False})
