"""What is sent in answer to one request, which can fail at any moment."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from serving.http import sse
from serving.http.errors import ApiError


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
            self._streams = kind.startswith(sse.MEDIA_TYPE)
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
            end = b"\n\n" * self._in_event + sse.event(error.body) + sse.DONE
            await self._send({"type": "http.response.body", "body": end, "more_body": False})
