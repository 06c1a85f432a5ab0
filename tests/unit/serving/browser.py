"""ASGI client for tests that act during a request."""

from __future__ import annotations

import asyncio
import json

from tests.waiting import HANG_SECONDS


class Browser:
    """ASGI client that can disconnect at any moment."""

    def __init__(self, app, path, body, whole=True, method="POST", key=""):
        self.incoming: asyncio.Queue = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": not whole})
        self.sent: list = []
        self.status = None
        self.unblocked = asyncio.Event()
        self.unblocked.set()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"127.0.0.1"),
                (b"content-type", b"application/json"),
                (b"authorization", f"Bearer {key}".encode()),
            ],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self.receive, self.send))

    async def receive(self):
        message = await self.incoming.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message):
        self.status = message.get("status", self.status)
        self.sent.append(message)
        await self.unblocked.wait()

    @property
    def answer(self):
        """Bytes of the response so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    def die(self):
        """Fail as Serve's replica sees it when its proxy is killed."""
        self.incoming.put_nowait(RuntimeError("The actor died."))

    def leave(self):
        self.incoming.put_nowait({"type": "http.disconnect"})


async def answered(app, *request, **more):
    """Send a request, wait for its end and return the client."""
    browser = Browser(app, *request, **more)
    await until(browser.task.done)
    return browser


async def until(condition):
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)
