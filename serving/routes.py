"""The HTTP application: OpenAI's paths that generate, the tokenizer's, and those of the other files of this folder."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from osd.engine.grammar import Grammar, GrammarError
from osd.engine.policy import Policy
from osd.engine.request import Request as Sequence
from osd.engine.request import SamplingParams, Update
from serving import dashboard, errors, reference
from serving.access.budget_guard import BudgetGuard
from serving.access.caller import Caller, caller_of
from serving.access.guard import KeyGuard
from serving.admin import AdminRoutes
from serving.errors import invalid
from serving.generation import Disconnected, Generation, seed_of
from serving.hosts import HostGuard, allowed_hosts
from serving.limits import (
    ARRIVING_BYTES,
    Admission,
    Arrivals,
    check_draft,
    check_ids,
    check_least,
    check_prompt,
    completion_budget,
    policy_of,
    read_body,
)
from serving.messages import Message
from serving.model_routes import ModelRoutes
from serving.reference.operation import described
from serving.reference.shapes import ChatChunk, ChatCompletion, Completion, CompletionChunk, Detokenized, Tokenized
from serving.responses import Answer, EventStream, Logprobs, collect, events
from serving.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generate,
    TokenizeRequest,
)
from serving.server_routes import ServerRoutes
from serving.service import ChatTemplateError, Service
from serving.structured import Structure
from serving.telemetry.observed import observed_of
from serving.telemetry.observing import Observer, Observing
from serving.telemetry.request_log import log_request
from serving.tokenizing import Tokenizing
from serving.tool_calls import CallReader
from serving.tool_formats import NoToolsError, ToolFormat
from serving.tools import Function

COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for /v1/completions."""
AnyBody = TypeVar("AnyBody", bound=ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest)
_COLDEST = 1e-4  # logits divided by less overflow float32; the distribution is greedy long before


def create_app(service: Service, observers: Iterable[Observer] = ()) -> FastAPI:
    """The application in front of one replica; ``observers`` hear of each request in the end."""
    app = FastAPI(title="osd", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    models = ModelRoutes(service)
    described = [one.router for one in (Routes(service, models), models, ServerRoutes(service), AdminRoutes(service))]
    for router in (*described, reference.router(described), dashboard.router(service)):
        app.include_router(router)
    # The one that is added last sees a request first.
    app.add_middleware(BudgetGuard, budgets=service.access.budgets)
    app.add_middleware(KeyGuard, keyring=service.access.keyring, open_paths=dashboard.OPEN_PATHS | reference.OPEN_PATHS)
    if (names := allowed_hosts(service.settings.serving)) is not None:
        app.add_middleware(HostGuard, names=names)
    app.add_middleware(Observing, observers=[*observers, log_request])
    return app


@dataclass(frozen=True)
class Asked:
    """A body that was read and checked, and its prompts as token ids.

    ``domain`` names whose drafter it wants, None to find out; ``policy`` is how it speculates, None for as the server
    does; ``seconds`` is how long its answer may take, None for any time; ``grammar`` is what it has to look like, and
    ``calls`` is how functions are called, None where there are none.
    """

    body: Generate
    prompts: list[list[int]]
    domain: str | None
    policy: Policy | None
    seconds: float | None
    grammar: Grammar | None
    calls: ToolFormat | None


class Routes:
    """Handlers over one service; all state is the counts of arriving requests and of admitted sequences."""

    def __init__(self, service: Service, models: ModelRoutes) -> None:
        self.service, self.limits, self._models = service, service.settings.serving, models
        self.admission = Admission(self.limits.max_queue)
        self.arrivals = Arrivals(self.limits.max_queue, max(ARRIVING_BYTES, self.limits.max_body_bytes))
        self.tokenizing = Tokenizing()
        self.compiling = ThreadPoolExecutor(1, "grammar")  # of its own: a grammar may take as long as a long text
        self.router = APIRouter()
        for path, handler, said in (
            ("/v1/chat/completions", self.chat, described("Answer a chat.", ChatCompletion, ChatRequest, ChatChunk)),
            ("/v1/completions", self.complete, described("Go on.", Completion, CompletionRequest, CompletionChunk)),
            ("/tokenize", self.tokenize, described("The token ids of a text or a chat.", Tokenized, TokenizeRequest)),
            ("/detokenize", self.detokenize, described("The text of token ids.", Detokenized, DetokenizeRequest)),
        ):
            self.router.add_api_route(path, handler, methods=["POST"], **said)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        with self.arrivals.one() as arrived:
            body, domain = await self._read(request, ChatRequest, arrived)
            self._check_cost(body, 1)
            calls = self._tool_format(body)
            prompts = [await self._encode_chat(body.messages, body.callable)]
            asked = await self._asked(body, prompts, domain, calls)
        return await self._generate(request, asked, self.limits.max_completion_tokens)

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        with self.arrivals.one() as arrived:
            body, domain = await self._read(request, CompletionRequest, arrived)
            self._check_cost(body, len(body.prompt))
            prompts = [await self._encode(p, True) if isinstance(p, str) else p for p in body.prompt]
            asked = await self._asked(body, prompts, domain)
        return await self._generate(request, asked, COMPLETION_TOKENS)

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        with self.arrivals.one() as arrived:
            body, _ = await self._read(request, TokenizeRequest, arrived)
            if body.messages is not None:
                ids = await self._encode_chat(body.messages, [])
            else:
                ids = await self._encode(body.prompt or "", body.add_special_tokens)
        return JSONResponse({"count": len(ids), "max_model_len": self.service.model.context, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        with self.arrivals.one() as arrived:
            body, _ = await self._read(request, DetokenizeRequest, arrived)
            check_ids(body.tokens, "tokens", self.service.model.vocabulary)
            text = await self.tokenizing.run(len(body.tokens), self.service.decode, body.tokens)
        return JSONResponse({"prompt": text})

    async def _read(
        self, request: Request, schema: type[AnyBody], arrived: Callable[[int], None]
    ) -> tuple[AnyBody, str | None]:
        """The body, and the domain that its ``model`` names."""
        body = await read_body(request, schema, self.limits, arrived)
        return body, await self._models.domain_of(body.model, caller_of(request).tenant)

    async def _asked(
        self, body: Generate, prompts: list[list[int]], domain: str | None, calls: ToolFormat | None = None
    ) -> Asked:
        """``domain`` is that of its ``model``, ``calls`` how functions are called, None where none may be."""
        named = body.osd.domain if body.osd else None
        if domain is not None and named not in (None, domain):
            raise invalid("'osd.domain' differs from the domain of 'model'.", "osd.domain")
        grammar = await self._grammar(body.structure if calls is None else body.structure_of(calls))
        return Asked(body, prompts, domain or named, await self._policy(body), self._seconds(body), grammar, calls)

    def _check_cost(self, body: Generate, prompts: int) -> None:
        """Refuse what is too much by its numbers alone, before work is done for it."""
        self.admission.check(prompts * (body.n or 1))
        check_draft(body.osd, self.service.settings)

    def _seconds(self, body: Generate) -> float | None:
        limit = self.limits.request_timeout_s
        if body.timeout is not None and limit is not None and body.timeout > limit:
            raise invalid(f"'timeout' is {body.timeout:g} and this server's limit is {limit:g} seconds.", "timeout")
        return limit if body.timeout is None else body.timeout

    async def _policy(self, body: Generate) -> Policy | None:
        return await self.tokenizing.run(0, policy_of, body.osd, self.service.settings) if body.osd else None

    async def _grammar(self, form: Structure | None) -> Grammar | None:
        if form is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.compiling, self.service.compile, form.kind, form.text)
        except GrammarError as error:
            raise invalid(f"'{form.param}' {error}.", form.param) from None

    async def _generate(self, request: Request, asked: Asked, default: int) -> Response:
        """Decode every prompt ``n`` times; ``default`` is how many tokens a body means that does not say."""
        model, body, prompts = self.service.model, asked.body, asked.prompts
        param = "messages" if body.chat else "prompt"
        check_ids((token for token, _ in body.logit_bias or ()), "logit_bias", model.vocabulary)
        check_ids(body.stop_token_ids or (), "stop_token_ids", model.vocabulary)
        response_id = f"{'chatcmpl' if body.chat else 'cmpl'}-{uuid.uuid4().hex}"
        seed = secrets.randbits(63) if body.seed is None else body.seed
        tokens, name = body.limit
        caller, observed = caller_of(request), observed_of(request)
        observed.asked(response_id, caller)
        common = replace(self._sequence(asked, caller), arrived=observed.arrived)
        sequences: list[Sequence] = []
        for ids in prompts:
            check_prompt(ids, param, model.context, model.vocabulary)
            limit = self.limits.max_completion_tokens
            budget = completion_budget(tokens, default, name, len(ids), model.context, limit)
            check_least(body.min_tokens or 0, budget)
            for choice in range(body.n or 1):
                sampling = replace(common.sampling, seed=seed_of(seed, choice))
                mine = f"{response_id}-{len(sequences)}"
                sequences.append(replace(common, id=mine, prompt_ids=tuple(ids), max_tokens=budget, sampling=sampling))
        logprobs = Logprobs(body.chat, partial(self.tokenizing.run, 0, self._texts))
        answer = Answer(
            response_id, body.model or model.id, body.chat, len(sequences), [len(ids) for ids in prompts], logprobs,
            None if asked.calls is None else partial(CallReader, asked.calls, [one.name for one in body.callable]),
        )  # fmt: skip
        charge = partial(self.service.access.budgets.charge, caller.key)
        generation = Generation(self.service, self.admission, sequences, asked.seconds, charge, observed)
        handed_over = False
        try:
            generation.start(request.receive)
            charge(sum(map(len, prompts)))
            updates = generation.updates()
            if not body.stream:
                return JSONResponse(await collect(answer, updates))
            # Only after the first round is the status sent: until then a failure is an HTTP code.
            updates = _again(await anext(updates), updates)
            options = body.stream_options
            usage = bool(options and options.include_usage)
            continuous = bool(options and options.continuous_usage_stats)
            handed_over = True
            return EventStream(events(answer, updates, usage, continuous), generation.close)
        except Disconnected:
            return Response(status_code=499)
        finally:
            if not handed_over:
                generation.close()

    def _sequence(self, asked: Asked, caller: Caller) -> Sequence:
        """What all sequences of a request have in common; they differ in prompt, budget, id and seed."""
        settings, body = self.service.settings, asked.body
        temperature = 1.0 if body.temperature is None else body.temperature
        sampling = SamplingParams(
            temperature=0.0 if temperature < _COLDEST else temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=tuple(body.logit_bias or ()),
            repeatable=body.seed is not None,
        )
        return Sequence(
            id="",
            prompt_ids=(),
            max_tokens=0,
            sampling=sampling,
            stop=tuple(body.stop or ()),
            stop_ids=tuple(body.stop_token_ids or ()),
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            capture=settings.capture.enabled and (self.limits.capture_default if body.store is None else body.store),
            speculate=body.osd is None or body.osd.speculate is not False,
            domain=asked.domain,
            policy=asked.policy,
            logprobs=body.top,
            grammar=asked.grammar,
            client=caller.client,
            tenant=caller.tenant,
            priority=(caller.key.priority if caller.key else 0) + (body.priority or 0),
        )

    async def _encode(self, text: str, special: bool) -> list[int]:
        return await self.tokenizing.run(len(text), self.service.encode, text, special)

    def _tool_format(self, body: ChatRequest) -> ToolFormat | None:
        """How functions are called, None where none may be."""
        param = "tools" if body.callable else "messages" if any(m.calls for m in body.messages) else None
        try:
            form = self.service.tool_format() if param else None
        except NoToolsError as error:
            raise invalid(str(error), param, "chat_template") from None
        return form if body.callable else None

    async def _encode_chat(self, messages: list[Message], callable: list[Function]) -> list[int]:
        functions = [{"type": "function", "function": one.template} for one in callable]
        size = sum(len(m.content or "") for m in messages) + sum(len(str(one)) for one in functions)
        try:
            return await self.tokenizing.run(size, self.service.encode_chat, [m.template for m in messages], functions)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages", "chat_template") from error

    def _texts(self, ids: list[int]) -> list[str]:
        return [self.service.decode([token]) for token in ids]


async def _again(first: tuple[int, Update], rest: AsyncIterator[tuple[int, Update]]) -> AsyncIterator[Any]:
    yield first
    async for item in rest:
        yield item
