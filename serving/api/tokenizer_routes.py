"""Tokenizer in threads, so that the event loop does not wait, and its routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from osd.target.vocabulary import TokenText
from serving.access.keys import caller_of
from serving.api.checks import check_ids
from serving.api.messages import Function, Message
from serving.api.schemas import DetokenizeRequest, TokenizeRequest
from serving.api.server_routes import ModelRoutes
from serving.http.errors import ApiError, invalid
from serving.http.limits import Arrivals
from serving.reference.document import described
from serving.reference.shapes import Detokenized, Tokenized
from serving.replica.replica import Replica
from serving.served_model import ChatTemplateError, TextTooLongError

LONG = 16_384
"""Characters or tokens from which a text counts as long; encoding a text of this size takes about 20 ms."""

LARGEST = 1 << 18
"""Bytes of a body that ``/tokenize`` accepts with every context; encoding takes up to 300 bytes of memory for each."""

BYTES_PER_PLACE = 8
"""Bytes of a body for each place of a longer context; a token of most texts has three to five bytes."""

Result = TypeVar("Result")


class Tokenizing:
    """Tokenizer with a thread for short texts and a thread for long texts, so that short texts never wait long."""

    def __init__(self, service: Replica) -> None:
        """Create the threads for the tokenizer of ``service``."""
        self._service = service
        self._short, self._long = (ThreadPoolExecutor(1, f"tokenize-{length}") for length in ("short", "long"))

    async def encode(self, text: str, special: bool, param: str = "", limit: int | None = None) -> list[int]:
        """Return the token ids of a text; ``special`` adds the tokenizer's special tokens around it.

        Raises:
            ApiError: status 400 if the text of the field ``param`` certainly has more than ``limit`` tokens; a text
                that passes may still have more.
        """
        try:
            return await self.run(len(text), self._service.encode, text, special, limit)
        except TextTooLongError as error:
            raise _too_long(param, error.tokens, limit) from None

    async def encode_chat(
        self,
        messages: list[Message],
        callable: list[Function],
        variables: dict[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a chat that the assistant continues.

        Args:
            messages: messages of the chat.
            callable: functions that the assistant may call.
            variables: further variables of the chat template.
            limit: number of tokens; see ``encode``.

        Raises:
            ApiError: status 400 if the model's chat template rejects the messages, or they are certainly too long.
        """
        functions = [{"type": "function", "function": function.template} for function in callable]
        chat = [m.template for m in messages], functions, variables or {}
        try:
            return await self.run(len(str(chat)), self._service.encode_chat, *chat, limit)
        except TextTooLongError as error:
            raise _too_long("messages", error.tokens, limit) from None
        except ChatTemplateError as error:
            raise invalid(str(error), "messages", "chat_template") from error

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return await self.run(len(ids), self._service.decode, ids)

    async def texts(self, ids: list[int]) -> list[TokenText]:
        """Return the text of each token id."""
        return await self.run(0, self._service.token_texts, ids)

    async def run(self, size: int, call: Callable[..., Result], *arguments: object) -> Result:
        """Run ``call`` in the thread for texts of ``size`` characters or tokens, and return its result."""
        thread = self._short if size < LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(thread, partial(call, *arguments))


def _too_long(param: str, tokens: int, limit: int | None) -> ApiError:
    message = f"'{param}' has at least {tokens} tokens and the limit is {limit}: shorten it."
    return invalid(message, param, "context_length_exceeded")


class TokenizerRoutes:
    """Handlers of the tokenizer routes."""

    def __init__(self, service: Replica, models: ModelRoutes, tokenizing: Tokenizing, arrivals: Arrivals) -> None:
        self._service, self._models, self._tokenizing, self._arrivals = service, models, tokenizing, arrivals
        self.router = APIRouter()
        add = self.router.add_api_route
        to_ids = described("Return the token ids of a text or a chat.", Tokenized, TokenizeRequest)
        add("/tokenize", self.tokenize, methods=["POST"], **to_ids)
        to_text = described("Return the text of token ids.", Detokenized, DetokenizeRequest)
        add("/detokenize", self.detokenize, methods=["POST"], **to_text)

    async def tokenize(self, request: Request) -> Response:
        """Handle ``POST /tokenize``."""
        most = max(LARGEST, BYTES_PER_PLACE * self._service.model.context)
        async with self._arrivals.body(request, TokenizeRequest, most) as body:
            await self._models.domain_of(body.model, caller_of(request).tenant)
            if body.messages is not None:
                ids = await self._tokenizing.encode_chat(body.messages, [])
            else:
                ids = await self._tokenizing.encode(body.prompt or "", body.add_special_tokens)
        return JSONResponse({"count": len(ids), "max_model_len": self._service.model.context, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """Handle ``POST /detokenize``."""
        async with self._arrivals.body(request, DetokenizeRequest) as body:
            await self._models.domain_of(body.model, caller_of(request).tenant)
            if len(body.tokens) > (most := max(self._service.model.context, LONG)):
                raise invalid(f"'tokens' has {len(body.tokens)} entries and the limit is {most}.", "tokens")
            check_ids(body.tokens, "tokens", self._service.model.vocabulary)
            text = await self._tokenizing.decode(body.tokens)
        return JSONResponse({"prompt": text})
