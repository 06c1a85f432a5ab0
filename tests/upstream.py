"""Small OpenAI-compatible server that answers at once, for tests of proxies."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.redis_servers import free_port
from tests.tiny import tokenizer
from tests.waiting import HANG_SECONDS

MODEL = "tiny"
LOGPROBS = {"content": [{"token": "H", "logprob": -0.1, "bytes": [72], "top_logprobs": []}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Rome"}'}}


class Upstream:
    """Server that stores requests and sends configured answers.

    Attributes:
        requests: path, headers and body of each request.
        text: the text of each answer.
        wait: the seconds between two pieces of an answer.
        calls_tool: whether an answer calls a function.
        gate: a semaphore that the server acquires after each piece.
        token_offset: an offset of token ids, which makes the tokenizer a different one.
        has_tokenize: whether ``/tokenize`` exists.
        metrics: the text of ``/metrics``.
        disconnects: streams whose client disconnected.
        fails: whether a stream fails after its first piece.
    """

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/tokenize")(self.tokenize)
        self.app.post("/v1/chat/completions")(self.complete)
        self.app.post("/v1/completions")(self.complete)
        self.app.get("/metrics")(self.tell)
        self.app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"])(self.echo)
        self.reset()

    def reset(self) -> None:
        """Restore the default answers."""
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.text, self.wait, self.calls_tool = "Hello you.", 0.0, False
        self.gate: threading.Semaphore | None = None
        self.token_offset, self.has_tokenize = 0, True
        self.metrics = ""
        self.cards: list[dict[str, Any]] = [{"id": MODEL, "object": "model", "root": MODEL}]
        self.disconnects = 0
        self.fails = False
        self.number = 0

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": self.cards})

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        if not self.has_tokenize:
            return JSONResponse({"detail": "Not Found"}, 404)
        text = body.get("prompt")
        if text is None:
            text = tokenizer().apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
        ids = [token + self.token_offset for token in tokenizer()(text, add_special_tokens=False)["input_ids"]]
        return JSONResponse({"count": len(ids), "max_model_len": 1024, "tokens": ids})

    async def tell(self, request: Request) -> Response:
        return Response(self.metrics or b"/metrics?", media_type="text/plain")

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        self.requests.append((request.url.path, dict(request.headers), body))
        status = int(request.query_params.get("status", 200))
        headers = {"x-own": "kept", "connection": "x-gone", "x-gone": "1"}
        answer = Response(
            request.scope["raw_path"] + b"?" + request.scope["query_string"] + b"\n" + body, status, headers
        )
        answer.headers.append("set-cookie", "a=1")
        answer.headers.append("set-cookie", "b=2")
        return answer

    async def complete(self, request: Request) -> Response:
        data = await request.body()
        self.requests.append((request.url.path, dict(request.headers), data))
        body = json.loads(data)
        chat = "messages" in body
        self.number += 1
        name = f"{'chatcmpl' if chat else 'cmpl'}-{self.number}"
        if body.get("stream"):
            return StreamingResponse(self.events(name, chat), media_type="text/event-stream")
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": LOGPROBS, "unknown": [1, None]}
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": None if self.calls_tool else self.text}
            choice["message"] = message | ({"tool_calls": [CALL]} if self.calls_tool else {})
        else:
            choice["text"] = self.text
        answer = {"id": name, "model": MODEL, "choices": [choice], "strange": {"é": 1.0e-7}}
        content = json.dumps(answer, indent=1).encode()
        if "gzip" in request.headers.get("accept-encoding", ""):
            packed = gzip.compress(content, mtime=0)
            return Response(packed, headers={"content-encoding": "gzip", "content-type": "application/json"})
        return Response(content, media_type="application/json")

    async def events(self, name: str, chat: bool) -> AsyncIterator[bytes]:
        try:
            for part in self.parts(chat):
                choice = {"index": 0, "finish_reason": None, "logprobs": LOGPROBS, "unknown": 1, **part}
                yield b"data: " + json.dumps({"id": name, "choices": [choice], "usage": None}).encode() + b"\n\n"
                await asyncio.sleep(self.wait)
                if self.gate is not None:
                    await asyncio.to_thread(self.gate.acquire)
                if self.fails:
                    raise RuntimeError
            yield (
                b'data: {"id": "%b", "choices": [], "usage": {"completion_tokens": 2, "total_tokens": 3}}\n\n'
                % name.encode()
            )
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.disconnects += 1
            raise

    def parts(self, chat: bool) -> Iterator[dict[str, Any]]:
        if self.calls_tool:
            head = {**CALL, "index": 0, "function": {"name": "look", "arguments": ""}}
            yield {"delta": {"role": "assistant", "content": None, "tool_calls": [head]}}
            for piece in ('{"at": ', '"Rome"}'):
                yield {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}}
            yield {"delta": {}, "finish_reason": "tool_calls"}
            return
        for start in range(0, len(self.text), 4):
            piece = self.text[start : start + 4]
            yield {"delta": {"content": piece}} if chat else {"text": piece}
        yield ({"delta": {}} if chat else {"text": ""}) | {"finish_reason": "stop"}


@contextmanager
def serving(app: Any, port: int | None = None) -> Iterator[str]:
    """Serve an ASGI application in a thread; yield its URL."""
    port = port or free_port()
    config = uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)
