"""The paths of the tokenizer: from texts and chats to token ids, and back."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serving.access.caller import caller_of
from serving.api.checks import check_ids
from serving.api.model_routes import ModelRoutes
from serving.api.schemas import DetokenizeRequest, TokenizeRequest
from serving.api.tokenizing import Tokenizing
from serving.http.limits import Arrivals
from serving.reference.document import described
from serving.reference.shapes import Detokenized, Tokenized
from serving.service import Service


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
