"""The processes that ``benchmarks.tap`` measures; they import no torch."""

from __future__ import annotations

import asyncio
import json

import uvicorn
from starlette.types import Receive, Scope, Send

from osd.capture.server import free_port
from osd.config import Settings
from osd.tap.agreement import Served
from osd.tap.app import Tap
from osd.tap.upstream import Upstream

MODEL = "instant"
"""What the server calls its model."""


async def instant(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with as many events as ``max_tokens`` says."""
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            break
    kind = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": kind})
    choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
    event = b"data: " + json.dumps({"id": "chatcmpl-1", "model": MODEL, "choices": [choice]}).encode() + b"\n\n"
    for _ in range(json.loads(data)["max_tokens"]):
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def upstream(port: int) -> None:
    """A server that answers at once."""
    uvicorn.run(instant, port=port, log_level="critical", lifespan="off")


def tap(port: int, behind: str, redis_url: str) -> None:
    """A tap in front of the server at an address."""
    given = {"port": port, "metrics_port": free_port()}
    settings = Settings.model_validate({"tap": given})
    Tap(settings, Upstream(behind), Served(frozenset({MODEL})), redis_url).run()
