"""Texts and token ids, on threads that the event loop does not wait for, and so the planning of trees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from serving.api.messages import Message
from serving.api.tools import Function
from serving.http.errors import invalid
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
