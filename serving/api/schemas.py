"""Request bodies: every accepted field is used, and an unsupported field is an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from osd.config import DOMAIN, GrowthSettings, Verification
from serving.access.keys import MOST_PRIORITY
from serving.api.messages import MOST_TOOLS, Content, Function, Messages, ToolChoice, Tools
from serving.api.structured import OutputConstraint, ResponseFormat, StructuredOutputs
from serving.api.tool_calls import ToolFormat
from serving.http.body import VLLM, Body, at_most, limits_of, too_many, unsupported

MOST_BIASES = 1024
"""Limit on the entries of ``logit_bias``."""
MOST_STOPS = 4
"""Limit on the entries of ``stop``."""
MOST_STOP_CHARACTERS = 4096
"""Limit on the characters of all ``stop`` strings together."""
MOST_STOP_IDS = 64
"""Limit on the entries of ``stop_token_ids``."""
MOST_METADATA = 16
"""Limit on the entries of ``metadata``, as in OpenAI's API; so are the limits on names and values."""
MOST_VARIABLES = 32
"""Limit on the entries of ``chat_template_kwargs``."""

_CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
}
_COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}


def _stops(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        if len(value) > MOST_STOPS:
            raise ValueError(f"has {len(value)} entries and the limit is {MOST_STOPS}")
        size = sum(len(entry) for entry in value if isinstance(entry, str))
        if size > MOST_STOP_CHARACTERS:
            raise ValueError(f"has {size} characters and the limit is {MOST_STOP_CHARACTERS}")
    return value


_Stop = Annotated[str, Field(min_length=1)]
_Ids = list[Annotated[int, Field(ge=0)]]
_NAME, _VALUE = 64, 512  # characters
_Metadata = dict[Annotated[str, Field(max_length=_NAME)], Annotated[str, Field(max_length=_VALUE)]]


def _biases(value: Any) -> Any:
    """Return a JSON object from token ids to numbers as pairs."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to numbers")
    if len(value) > MOST_BIASES:
        raise ValueError(f"has {len(value)} entries and the limit is {MOST_BIASES}")
    pairs = []
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError("each key must be a token id in decimal digits")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("each value must be a number between -100 and 100")
        pairs.append((int(token), float(bias)))
    return pairs


def _prompts(value: Any, info: ValidationInfo) -> Any:
    """Return a list of prompts, given a text, a list of token ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of token ids, or a list of these that is not empty")
    limit = limits_of(info).max_queue
    if len(value) > limit:
        raise too_many("prompt", len(value), limit)
    for prompt in value:
        ids = isinstance(prompt, list) and set(map(type, prompt)) <= {int} and min(prompt, default=0) >= 0
        if not (isinstance(prompt, str) or ids):
            raise ValueError("must be a text, a list of token ids, or a list of these")
    return value


_STOPS = BeforeValidator(_stops, json_schema_input_type=_Stop | list[_Stop] | None)
_BIASES = BeforeValidator(_biases, json_schema_input_type=dict[str, float] | None)
_PROMPTS = BeforeValidator(_prompts, json_schema_input_type=str | _Ids | list[str | _Ids])


class StreamOptions(Body):
    """Token counts that a stream reports in addition to text."""

    include_usage: bool | None = Field(
        default=None,
        description="end the stream with an event that has the usage",
        json_schema_extra={"default": False},
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="report the usage so far in each event", json_schema_extra={**VLLM, "default": False}
    )


_LOSSY = "osd.completion.lossy"


class CompletionControl(Body):
    """Probability thresholds above which a controller acts on this completion."""

    stop: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="end the answer before a token that the controller judges to be wrong with a higher probability; "
        "not supported with tools or a required format",
    )
    exit: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="let a draft leave the target's layers early if leaving has a higher probability; by default 0",
    )
    lossy: bool | None = Field(
        None,
        description="let the answer itself leave the layers early; needs exit and serving.allow_lossy; not supported "
        "with growth, verification, a true store, tools or a required format",
        json_schema_extra={"default": False},
    )

    @property
    def first_threshold(self) -> str | None:
        """Name of the first threshold that is set; None without a threshold."""
        return next((name for name in ("stop", "exit") if getattr(self, name) is not None), None)

    @model_validator(mode="after")
    def _leaves_somewhere(self) -> CompletionControl:
        if self.lossy and self.exit is None:
            raise unsupported(_LOSSY, "'{param}' is not supported without 'osd.completion.exit'.")
        return self


class Speculation(Body):
    """Settings of speculative decoding for this request; all except ``completion`` change the speed only."""

    speculate: bool | None = Field(
        None, description="false: decode without drafts", json_schema_extra={"default": True}
    )
    growth: GrowthSettings | None = Field(
        None,
        description="growth policy, with the fields of the setting growth except governed; at most engine.max_draft "
        "draft tokens; by default the setting growth",
    )
    verification: Verification | None = Field(
        None, description="verification rule; by default the setting verification"
    )
    domain: str | None = Field(
        None,
        pattern=DOMAIN,
        description="domain whose drafter is used, or the default drafter if it has none; 1 to 64 of a-z, 0-9, _ and "
        "-, starting with a letter or digit; not different from a domain in model; by default chosen by the prompt",
    )
    sources: bool | None = Field(
        None,
        description="report the source of each token (token_sources of a choice), and the drafted and accepted tokens "
        "of each source (sources of the metrics)",
        json_schema_extra={"default": False},
    )
    completion: CompletionControl | None = Field(
        None, description="thresholds of a controller; only with the drafter early_exit, and not with speculate false"
    )

    @property
    def stop(self) -> float | None:
        """Probability above which a completion judged to be wrong ends; None for never."""
        return None if self.completion is None else self.completion.stop

    @property
    def lossy(self) -> bool:
        """Whether the answer may leave the target's layers early."""
        return self.completion is not None and bool(self.completion.lossy)

    @model_validator(mode="after")
    def _fits(self) -> Speculation:
        # A lossy answer is decoded without drafts.
        for name in ("growth", "verification"):
            if self.lossy and getattr(self, name) is not None:
                raise unsupported(f"osd.{name}", f"'{{param}}' is not supported with '{_LOSSY}'.")
        threshold = None if self.completion is None else self.completion.first_threshold
        if threshold is not None and self.speculate is False:
            # The controller is part of the drafter.
            param = f"osd.completion.{threshold}"
            raise unsupported(param, "'{param}' is not supported where 'osd.speculate' is false.")
        # The engine plans its own drafts only; a request gets exactly the growth that it sets.
        if self.growth is not None and "governed" in self.growth.model_fields_set:
            raise unsupported("osd.growth.governed")
        return self


_IGNORED = "accepted and ignored"


class Generate(Body):
    """Fields that chat and text completions share; null means the default."""

    chat: ClassVar[bool] = False

    model: str | None = Field(
        None,
        description="id of the model, or MODEL:DOMAIN for the drafter of a domain, as in /v1/models; by default the "
        "served model",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens of the answer; at most serving.max_completion_tokens, and together with the prompt "
        "at most engine.context; by default 16 for text completions, and as many as these limits allow for chats",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="divisor of the logits; 0, as any value below 0.0001, takes the most probable token",
        json_schema_extra={"default": 1},
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="sample from the most probable tokens that together have this probability",
        json_schema_extra={"default": 1},
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=2**31,
        description="sample from this many most probable tokens; 0 and -1: from all",
        json_schema_extra={**VLLM, "default": 0},
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="sample from the tokens with at least this share of the highest probability",
        json_schema_extra={**VLLM, "default": 0},
    )
    presence_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="subtracted from the logits of tokens that the answer already has",
        json_schema_extra={"default": 0},
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="subtracted from the logit of a token once for each time that the answer has the token",
        json_schema_extra={"default": 0},
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=100,
        allow_inf_nan=False,
        description="divisor of positive logits, and factor of negative ones, of tokens that prompt or answer has",
        json_schema_extra={**VLLM, "default": 1},
    )
    logit_bias: Annotated[list[tuple[int, float]] | None, _BIASES] = Field(
        None,
        description="object from token ids to numbers from -100 to 100, which are added to their logits; at most "
        f"{MOST_BIASES} entries",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="make the text depend on prompt, settings and seed only, not on drafts; by default each request "
        "has another random seed",
    )
    stop: Annotated[list[_Stop] | None, _STOPS] = Field(
        None,
        description=f"text, or list of at most {MOST_STOPS} texts, before which the answer ends; none is empty; "
        f"together at most {MOST_STOP_CHARACTERS} characters",
    )
    stop_token_ids: Annotated[_Ids | None, at_most(MOST_STOP_IDS)] = Field(
        None, description=f"ids of tokens that end the answer; at most {MOST_STOP_IDS}", json_schema_extra=VLLM
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        description="tokens before which the answer does not end, unless its required format allows no other token; "
        "at most the limit of the answer, as max_tokens sets it",
        json_schema_extra={**VLLM, "default": 0},
    )
    n: int | None = Field(
        None,
        ge=1,
        le=8,
        description="answers to each prompt; over all prompts at most serving.max_queue",
        json_schema_extra={"default": 1},
    )
    stream: bool | None = Field(
        None, description="send the answer as server-sent events", json_schema_extra={"default": False}
    )
    stream_options: StreamOptions | None = Field(None, description="token counts in a stream; only with stream")
    ignore_eos: bool | None = Field(
        None,
        description="do not end the answer at an end-of-text token; not supported with a required format or call",
        json_schema_extra={**VLLM, "default": False},
    )
    timeout: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="seconds from the submission to the engine until the answer must be complete; at most, and by "
        "default, serving.request_timeout_s",
        json_schema_extra={"x-api": "osd"},
    )
    priority: int | None = Field(
        None,
        ge=0,
        le=MOST_PRIORITY,
        description="the lowest value is served first; the priority of the key is added",
        json_schema_extra={**VLLM, "default": 0},
    )
    store: bool | None = Field(
        None,
        description="capture the request, so that drafters learn from it, if capture.enabled is true; by default "
        "serving.capture_default",
    )
    user: str | None = Field(None, description=_IGNORED)
    safety_identifier: str | None = Field(None, description=_IGNORED)
    prompt_cache_key: str | None = Field(None, description=_IGNORED)
    prompt_cache_retention: str | None = Field(None, description=_IGNORED)
    metadata: Annotated[_Metadata | None, at_most(MOST_METADATA)] = Field(
        None,
        description=f"{_IGNORED}; at most {MOST_METADATA} entries, with names of {_NAME} and values of {_VALUE} "
        "characters",
    )
    service_tier: str | None = Field(None, description=_IGNORED)
    response_format: ResponseFormat | None = Field(
        None,
        description="required format of the answer, for text completions as in vLLM; not supported with tools",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="required format of the answer, in one of these fields; not supported with tools, nor with "
        "another response_format than text",
        json_schema_extra=VLLM,
    )
    osd: Speculation | None = Field(
        None, description="speculative decoding of this request", json_schema_extra={"x-api": "osd"}
    )

    @property
    def structure(self) -> OutputConstraint | None:
        """Constraint on the answer; None for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure
        return None if self.response_format is None else self.response_format.structure

    @property
    def callable(self) -> list[Function]:
        """Functions that the model may call."""
        return []

    def structure_of(self, calls: ToolFormat) -> OutputConstraint | None:
        """Return the constraint on an answer with calls in the format ``calls``; None without a constraint."""
        return None

    @property
    def limit(self) -> tuple[int | None, str]:
        """Limit on the tokens of a completion, None without a limit, and the name of the field that sets it."""
        return self.max_tokens, "max_tokens"

    @property
    def top(self) -> int | None:
        """Number of most probable tokens to report per position; None to report no log-probabilities."""
        return None

    @property
    def reports_sources(self) -> bool:
        """Whether to report the source of each token."""
        return self.osd is not None and bool(self.osd.sources)

    @model_validator(mode="after")
    def _fits(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "'{param}' is only supported with stream.")
        response_format = None if self.response_format is None else self.response_format.structure
        if self.structured_outputs is not None and response_format is not None:
            raise unsupported("structured_outputs", "'{param}' is not supported together with 'response_format'.")
        if self.structure is not None and self.ignore_eos:
            # A grammar has an end, and no token can follow it.
            raise unsupported("ignore_eos", "'{param}' is not supported where the form of the answer is given.")
        if (self.structure is not None or self.callable) and self.osd is not None and self.osd.stop is not None:
            # The finish reason ``stop`` promises a complete answer.
            raise unsupported(
                "osd.completion.stop",
                "'{param}' is not supported where the form of the answer is given, nor with tools.",
            )
        lossy = self.osd is not None and self.osd.lossy
        if lossy and (self.structure is not None or self.callable):
            # The head at an early exit does not know all tokens, and a grammar may require a missing token.
            message = "'{param}' is not supported where the form of the answer is given, nor with tools."
            raise unsupported(_LOSSY, message)
        if lossy and self.store:
            raise unsupported("store", f"'{{param}}' is not supported with '{_LOSSY}': lossy answers are not learned.")
        return self


_TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template", "conversation")


def _variable(name: str) -> str:
    if not name.isidentifier() or name.startswith("_") or name in _TEMPLATE_OWN or name.endswith("_token"):
        raise ValueError("must be the name of a variable of the chat template")
    return name


_Variables = dict[Annotated[str, Field(max_length=_NAME), AfterValidator(_variable)], str | int | float | bool | None]


class PredictedOutput(Body):
    """Text that the client expects in the answer, such as a file in which only a few lines change.

    Drafts are copied from it; the answer is the same without it. The usage reports how many draft tokens were accepted.
    """

    type: Literal["content"]
    content: Content = Field(description="text, or list of text parts; at most engine.context tokens")


class ChatRequest(Generate):
    """Body of ``POST /v1/chat/completions``."""

    neutral = _CHAT_NEUTRAL
    chat = True

    messages: Messages = Field(
        description="messages of the chat, the oldest first; at least one, and at most serving.max_messages; together "
        "fewer tokens than engine.context"
    )
    tools: Tools = Field(
        None,
        description=f"functions that the model may call, with different names; at most {MOST_TOOLS}; the chat template "
        "of the model must support them",
    )
    tool_choice: ToolChoice = Field(
        None,
        description="auto: the model decides; none: no call; required: at least one call; or the function to call",
        json_schema_extra={"default": "auto"},
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call in an answer", json_schema_extra={"default": True}
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="later name of max_tokens; if both are set, they must be equal"
    )
    logprobs: bool | None = Field(
        None, description="report the log-probability of each token", json_schema_extra={"default": False}
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="most probable tokens to report at each position; only with logprobs",
        json_schema_extra={"default": 0},
    )
    prediction: PredictedOutput | None = Field(
        None,
        description="expected text of the answer, from which recall drafts; needs a drafter with recall, and is "
        "not supported with a false osd.speculate",
    )
    reasoning_effort: Annotated[str, Field(pattern="^[a-z]{1,16}$")] | None = Field(
        None, description="variable of the chat template, which must use it unless the value is none; 1 to 16 of a-z"
    )
    chat_template_kwargs: Annotated[_Variables | None, at_most(MOST_VARIABLES)] = Field(
        None,
        description="object of variables of the chat template, which must use them: texts, numbers, booleans or null; "
        f"at most {MOST_VARIABLES} entries, with names of {_NAME} characters",
        json_schema_extra=VLLM,
    )

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template that the request sets."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @property
    def limit(self) -> tuple[int | None, str]:
        both = (self.max_completion_tokens, "max_completion_tokens"), (self.max_tokens, "max_tokens")
        return both[0] if self.max_completion_tokens else both[1]

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def callable(self) -> list[Function]:
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if none else [tool.function for tool in self.tools or ()]

    @property
    def required_functions(self) -> list[Function]:
        """Functions to choose from when the model must call a function; empty if it may answer with text."""
        if self.tool_choice is None or self.tool_choice.type in ("none", "auto"):
            return []
        named = self.tool_choice.function
        return [function for function in self.callable if named is None or function.name == named.name]

    def structure_of(self, calls: ToolFormat) -> OutputConstraint | None:
        """Return the constraint for required calls, ``strict`` functions or at most one call; otherwise None."""
        is_strict = any(function.strict for function in self.callable)
        if not (self.required_functions or self.parallel_tool_calls is False or is_strict):
            return None
        functions = {function.name: function.arguments for function in self.required_functions or self.callable}
        is_named = self.tool_choice is not None and self.tool_choice.function is not None
        several = self.parallel_tool_calls is not False and not is_named
        return OutputConstraint("tools", "grammar", calls.grammar(functions, several, free=not self.required_functions))

    @model_validator(mode="after")
    def _fits_a_chat(self) -> ChatRequest:
        needs_call = self.tool_choice is not None and self.tool_choice.type not in ("none", "auto")
        if needs_call and not self.required_functions:
            raise PydanticCustomError("no_such", "'{param}' names no function of 'tools'.", {"param": "tool_choice"})
        if self.callable and self.structure is not None:
            raise unsupported("tools", "'{param}' is not supported where the form of the answer is given.")
        if self.required_functions and self.ignore_eos:
            raise unsupported("ignore_eos", "'{param}' is not supported where a function has to be called.")
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "'{param}' is only supported with logprobs.")
        if self.prediction is not None and self.osd is not None and self.osd.speculate is False:
            raise unsupported("prediction", "'{param}' is not supported where 'osd.speculate' is false.")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise unsupported("max_tokens", "'{param}' differs from 'max_completion_tokens'.")
        return self


class CompletionRequest(Generate):
    """Body of ``POST /v1/completions``; each prompt gets ``n`` choices."""

    neutral = _COMPLETION_NEUTRAL

    prompt: Annotated[list[str | list[int]], _PROMPTS] = Field(
        description="text, list of token ids, or list of these; at most serving.max_queue prompts, each with at "
        "least one token and fewer than engine.context"
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=5,
        description="most probable tokens to report at each position, in addition to the token itself; by default no "
        "log-probabilities",
    )

    @property
    def top(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``, with a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_text_or_chat(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise unsupported("prompt", "Give either '{param}' or 'messages'.")
        return self


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]] = Field(fail_fast=True)
