"""The tokenizer, on threads that the event loop does not wait for, and its paths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serving.access.keys import caller_of
from serving.api.checks import check_ids
from serving.api.messages import Function, Message
from serving.api.schemas import DetokenizeRequest, TokenizeRequest
from serving.api.server_routes import ModelRoutes
from serving.http.errors import invalid
from serving.http.limits import Arrivals
from serving.reference.document import described
from serving.reference.shapes import Detokenized, Tokenized
from serving.service import ChatTemplateError, Service

LONG = 16_384
"""Characters, or tokens, from which on a text is a long one: it takes some 20 ms."""

Result = TypeVar("Result")


class Tokenizing:
    """Two threads: long texts wait for each other in one of their own, and short ones never for them."""

    def __init__(self, service: Service) -> None:
        """Use the tokenizer of ``service``."""
        self._service = service
        self._short, self._long = (ThreadPoolExecutor(1, f"tokenize-{length}") for length in ("short", "long"))

    async def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens around it if ``special``."""
        return await self.run(len(text), self._service.encode, text, special)

    async def encode_chat(self, messages: list[Message], callable: list[Function]) -> list[int]:
        """Token ids of a chat that the assistant continues, and that may call functions.

        Raises:
            ApiError: 400; the model's template does not take it.
        """
        functions = [{"type": "function", "function": one.template} for one in callable]
        size = sum(len(m.content or "") for m in messages) + sum(len(str(one)) for one in functions)
        try:
            return await self.run(size, self._service.encode_chat, [m.template for m in messages], functions)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages", "chat_template") from error

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        return await self.run(len(ids), self._service.decode, ids)

    async def texts(self, ids: list[int]) -> list[str]:
        """The text of each of some token ids."""
        return await self.run(0, lambda: [self._service.decode([token]) for token in ids])

    async def run(self, size: int, call: Callable[..., Result], *arguments: object) -> Result:
        """What ``call`` returns for a text of ``size`` characters or tokens."""
        thread = self._short if size < LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(thread, partial(call, *arguments))


class TokenizerRoutes:
    """Handlers over one service."""

    def __init__(self, service: Service, models: ModelRoutes, tokenizing: Tokenizing, arrivals: Arrivals) -> None:
        self._service, self._models, self._tokenizing, self._arrivals = service, models, tokenizing, arrivals
        self.router = APIRouter()
        add = self.router.add_api_route
        to_ids = described("The token ids of a text or a chat.", Tokenized, TokenizeRequest)
        add("/tokenize", self.tokenize, methods=["POST"], **to_ids)
        to_text = described("The text of token ids.", Detokenized, DetokenizeRequest)
        add("/detokenize", self.detokenize, methods=["POST"], **to_text)

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        async with self._arrivals.body(request, TokenizeRequest) as body:
            await self._models.domain_of(body.model, caller_of(request).tenant)
            if body.messages is not None:
                ids = await self._tokenizing.encode_chat(body.messages, [])
            else:
                ids = await self._tokenizing.encode(body.prompt or "", body.add_special_tokens)
        return JSONResponse({"count": len(ids), "max_model_len": self._service.model.context, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        async with self._arrivals.body(request, DetokenizeRequest) as body:
            await self._models.domain_of(body.model, caller_of(request).tenant)
            check_ids(body.tokens, "tokens", self._service.model.vocabulary)
            text = await self._tokenizing.decode(body.tokens)
        return JSONResponse({"prompt": text})
