"""Routes of chat and text completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from osd.engine.request import Update
from serving.access.keys import Caller, caller_of
from serving.api.engine_requests import EngineRequests, Prepared
from serving.api.generation import Generation
from serving.api.responses import collect, events
from serving.api.schemas import ChatRequest, CompletionRequest
from serving.http.errors import Disconnected
from serving.http.limits import AnyBody, Arrivals
from serving.http.sse import EventStream
from serving.reference.document import described
from serving.reference.shapes import ChatChunk, ChatCompletion, CompletionChunk, TextCompletion
from serving.replica.replica import Replica
from serving.telemetry.observed import observed_of


class GenerateRoutes:
    """Handlers of chat and text completions."""

    def __init__(self, service: Replica, requests: EngineRequests, arrivals: Arrivals) -> None:
        self._service, self._requests, self._arrivals = service, requests, arrivals
        self.router = APIRouter()
        add = self.router.add_api_route
        chats = described("Create a chat completion.", ChatCompletion, ChatRequest, ChatChunk)
        add("/v1/chat/completions", self.chat, methods=["POST"], **chats)
        completes = described("Create a text completion.", TextCompletion, CompletionRequest, CompletionChunk)
        add("/v1/completions", self.complete, methods=["POST"], **completes)

    async def chat(self, request: Request) -> Response:
        """Handle ``POST /v1/chat/completions``."""
        return await self._answer(request, await self._prepare(request, ChatRequest, self._requests.chat))

    async def complete(self, request: Request) -> Response:
        """Handle ``POST /v1/completions``."""
        return await self._answer(request, await self._prepare(request, CompletionRequest, self._requests.completion))

    async def _prepare(
        self, request: Request, schema: type[AnyBody], prepare: Callable[[AnyBody, Caller], Awaitable[Prepared]]
    ) -> Prepared:
        async with self._arrivals.body(request, schema) as body:
            return await prepare(body, caller_of(request))

    async def _answer(self, request: Request, prepared: Prepared) -> Response:
        service, caller, observed, builder = self._service, caller_of(request), observed_of(request), prepared.builder
        observed.identify(builder.id, caller)
        sequences = [replace(sequence, arrived=observed.arrived) for sequence in prepared.sequences]
        charge = partial(service.access.budgets.charge, caller.key)
        generation = Generation(
            service, self._requests.admission, sequences, prepared.seconds, charge, observed, prepared.constrained_by
        )
        handed_over = False
        try:
            generation.start(request.receive)
            charge(sum(builder.prompts))
            updates = generation.updates()
            if not prepared.stream:
                return JSONResponse(await collect(builder, updates))
            # Wait for the first update before the status is sent, so that an earlier failure has its own status.
            updates = _prepend(await anext(updates), updates)
            handed_over = True
            stream = events(builder, updates, prepared.usage, prepared.continuous_usage)
            return EventStream(stream, generation.close)
        except Disconnected:
            return Response(status_code=499)
        finally:
            if not handed_over:
                generation.close()


async def _prepend(first: tuple[int, Update], rest: AsyncIterator[tuple[int, Update]]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item
