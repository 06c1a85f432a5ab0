"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.generation import Disconnected

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
