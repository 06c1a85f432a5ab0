"""Conversion of request bodies to requests of the engine, with validation; cheap checks come first."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from osd.engine.completion import ControllerOptions
from osd.engine.grammar import Grammar, GrammarError
from osd.engine.request import Request, SamplingParams
from osd.engine.thinking import Thinking
from serving.access.keys import Caller
from serving.api.checks import (
    check_completion,
    check_draft,
    check_ids,
    check_prompt,
    completion_budget,
    policy_of,
)
from serving.api.responses import Logprobs, ResponseBuilder, TokenSources
from serving.api.schemas import ChatRequest, CompletionRequest, Generate, StreamOptions
from serving.api.server_routes import ModelRoutes
from serving.api.structured import OutputConstraint
from serving.api.thinking import thinking_marks, unknown_variable
from serving.api.tokenizer_routes import Tokenizing
from serving.api.tool_calls import CallReader, NoToolsError, ToolFormat, tool_format
from serving.http.errors import invalid
from serving.http.limits import Admission
from serving.replica.replica import Replica

COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for /v1/completions."""

_MARK_TOKENS = 16
"""Last tokens of a prompt, in which the first mark of thinking is looked for."""

_LEAST_TEMPERATURE = 1e-4  # below, logits / temperature overflows float32; decoding is greedy well above this value


@dataclass(frozen=True)
class Prepared:
    """Validated request with its sequences. The body, which may be large, is not kept while it is answered.

    Attributes:
        builder: builder of the response.
        sequences: requests of the engine; each prompt has the same number, and they are ordered by prompt.
        stream: whether the response is sent as events.
        usage: whether the events end with token counts.
        continuous_usage: whether each event has token counts.
        seconds: time limit of the response; None for no limit.
        constrained_by: field of the body that constrains the text of the answer; "" for none.
    """

    builder: ResponseBuilder
    sequences: list[Request]
    stream: bool
    usage: bool
    continuous_usage: bool
    seconds: float | None
    constrained_by: str


class EngineRequests:
    """Converter of bodies to requests of the engine; ``admission`` is the queue of the replica."""

    def __init__(self, service: Replica, models: ModelRoutes, tokenizing: Tokenizing) -> None:
        self._service, self._limits, self._models = service, service.settings.serving, models
        self._tokenizing = tokenizing
        self._compiling = ThreadPoolExecutor(1, "grammar")  # compiling may take as long as a long text
        self.admission = Admission(self._limits.max_queue)

    async def chat(self, body: ChatRequest, caller: Caller) -> Prepared:
        """Prepare a ``POST /v1/chat/completions`` request.

        Raises:
            ApiError: the request is invalid or the queue is full.
        """
        domain = await self._check_limits(body, 1, caller)
        calls = self._tool_format(body)
        template, variables = self._service.template(), body.variables
        if variables.get("reasoning_effort") == "none" and unknown_variable(template, ["reasoning_effort"]):
            del variables["reasoning_effort"]  # "none" asks nothing of a template without the variable
        if (name := unknown_variable(template, variables)) is not None:
            param = "reasoning_effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
            raise invalid(f"'{param}' is not supported: the model's chat template does not use it.", param)
        longest = self._service.model.context - 1
        prompt = await self._tokenizing.encode_chat(body.messages, body.callable, variables, longest)
        form = body.structure if calls is None else body.structure_of(calls)
        most = self._limits.max_completion_tokens
        common = await self._common(body, caller, domain, form)
        if body.prediction is not None:
            common = replace(common, prediction=await self._predicted(body.prediction.content))
        marks = thinking_marks(template)
        if marks is not None and common.grammar is None:  # a grammar leaves no room for thinking
            end = await self._tokenizing.decode(prompt[-_MARK_TOKENS:])
            common = replace(common, thinking=Thinking(marks, end.rstrip().endswith(marks.begin)))
        return self._prepared(body, [prompt], common, most, form, calls)

    async def _predicted(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prediction."""
        if not self._service.settings.recalls:
            raise invalid("'prediction' is not supported: this server drafts without recall.", "prediction")
        context = self._service.model.context
        ids = await self._tokenizing.encode(text, False, "prediction", context)
        if len(ids) > context:
            raise invalid(f"'prediction' has {len(ids)} tokens and the limit is {context}.", "prediction")
        return tuple(ids)

    async def completion(self, body: CompletionRequest, caller: Caller) -> Prepared:
        """Prepare a ``POST /v1/completions`` request.

        Raises:
            ApiError: the request is invalid or the queue is full.
        """
        domain = await self._check_limits(body, len(body.prompt), caller)
        encode, longest = self._tokenizing.encode, self._service.model.context - 1
        prompts = [
            await encode(prompt, True, "prompt", longest) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        common = await self._common(body, caller, domain, body.structure)
        return self._prepared(body, prompts, common, COMPLETION_TOKENS, body.structure)

    async def _check_limits(self, body: Generate, prompts: int, caller: Caller) -> str | None:
        """Check everything that needs no tokenizer; return the requested domain, or None to detect the domain."""
        domain = await self._models.domain_of(body.model, caller.tenant)
        named = body.osd.domain if body.osd else None
        if domain is not None and named not in (None, domain):
            raise invalid("'osd.domain' differs from the domain of 'model'.", "osd.domain")
        limit, vocabulary = self._limits.request_timeout_s, self._service.model.vocabulary
        if body.timeout is not None and limit is not None and body.timeout > limit:
            raise invalid(f"'timeout' is {body.timeout:g} and this server's limit is {limit:g} seconds.", "timeout")
        check_ids((token for token, _ in body.logit_bias or ()), "logit_bias", vocabulary)
        check_ids(body.stop_token_ids or (), "stop_token_ids", vocabulary)
        self.admission.check(prompts * (body.n or 1))
        check_draft(body.osd, self._service.settings)
        check_completion(body.osd, self._service.settings)
        return domain or named

    def _tool_format(self, body: ChatRequest) -> ToolFormat | None:
        """Return the format of function calls; None if the model may not call functions."""
        param = "tools" if body.callable else "messages" if any(m.calls for m in body.messages) else None
        try:
            form = tool_format(self._service.template()) if param else None
        except NoToolsError as error:
            raise invalid(str(error), param, "chat_template") from None
        return form if body.callable else None

    async def _common(
        self, body: Generate, caller: Caller, domain: str | None, form: OutputConstraint | None
    ) -> Request:
        """Return the part that the sequences of a request share: all but prompt, token budget, id and seed."""
        settings = self._service.settings
        temperature = 1.0 if body.temperature is None else body.temperature
        sampling = SamplingParams(
            temperature=0.0 if temperature < _LEAST_TEMPERATURE else temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=tuple(body.logit_bias or ()),
            repeatable=body.seed is not None,
        )
        return Request(
            id="",
            prompt_ids=(),
            max_tokens=0,
            sampling=sampling,
            stop=tuple(body.stop or ()),
            stop_ids=tuple(body.stop_token_ids or ()),
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            capture=settings.capture.enabled and (self._limits.capture_default if body.store is None else body.store),
            completes=not body.chat,
            speculate=body.osd is None or body.osd.speculate is not False,
            domain=domain,
            policy=await self._tokenizing.run(0, policy_of, body.osd, settings) if body.osd else None,
            logprobs=body.top,
            sources=body.reports_sources,
            grammar=await self._grammar(form),
            client=caller.client,
            tenant=caller.tenant,
            controller=_controller_options(body),
            priority=(caller.key.priority if caller.key else 0) + (body.priority or 0),
        )

    async def _grammar(self, form: OutputConstraint | None) -> Grammar | None:
        if form is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._compiling, self._service.compile, form.kind, form.text)
        except GrammarError as error:
            raise invalid(f"'{form.param}' {error}.", form.param) from None

    def _prepared(
        self,
        body: Generate,
        prompts: list[list[int]],
        common: Request,
        default: int,
        form: OutputConstraint | None,
        calls: ToolFormat | None = None,
    ) -> Prepared:
        """Return the request with ``n`` sequences per prompt; ``default`` is the default limit of tokens."""
        model = self._service.model
        response_id = f"{'chatcmpl' if body.chat else 'cmpl'}-{uuid.uuid4().hex}"
        tokens, name = body.limit
        sequences: list[Request] = []
        for ids in prompts:
            seed = secrets.randbits(63) if body.seed is None else body.seed
            check_prompt(ids, "messages" if body.chat else "prompt", model.context, model.vocabulary)
            limit = self._limits.max_completion_tokens
            budget = completion_budget(tokens, default, name, len(ids), model.context, limit)
            if (least := body.min_tokens or 0) > budget:
                message = f"'min_tokens' is {least} and the completion may have {budget} tokens at most."
                raise invalid(message, "min_tokens")
            for choice in range(body.n or 1):
                sampling = replace(common.sampling, seed=seed_of(seed, choice))
                sequence_id = f"{response_id}-{len(sequences)}"
                sequences.append(
                    replace(common, id=sequence_id, prompt_ids=tuple(ids), max_tokens=budget, sampling=sampling)
                )
        texts, functions = self._tokenizing.texts, [function.name for function in body.callable]
        builder = ResponseBuilder(
            id=response_id,
            model=body.model or model.id,
            chat=body.chat,
            choices=len(sequences),
            prompts=[len(ids) for ids in prompts],
            logprobs=Logprobs(body.chat, texts),
            sources=TokenSources(texts) if body.reports_sources else None,
            reader=None if calls is None else partial(CallReader, calls, functions),
            thinking=common.thinking,
            predicts=bool(common.prediction),
        )
        options = body.stream_options or StreamOptions()
        return Prepared(
            builder,
            sequences,
            stream=bool(body.stream),
            usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            seconds=self._limits.request_timeout_s if body.timeout is None else body.timeout,
            constrained_by="" if form is None else form.param,
        )


def _controller_options(body: Generate) -> ControllerOptions | None:
    control = None if body.osd is None else body.osd.completion
    if control is None or control.first_threshold is None:
        return None
    return ControllerOptions(control.stop, control.exit, bool(control.lossy))


def seed_of(seed: int, choice: int) -> int:
    """Return the seed of a choice, 63 bits; choice 0 has the seed of a request for a single choice."""
    seed %= 2**63
    if not choice:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
