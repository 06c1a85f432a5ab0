"""Request bodies: every accepted field is used, and an unsupported field is an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from osd.config import DOMAIN, GrowthSettings, Verification
from serving.access.keys import MOST_PRIORITY
from serving.api.messages import Content, Function, Messages, ToolChoice, Tools
from serving.api.structured import OutputConstraint, ResponseFormat, StructuredOutputs
from serving.api.tool_calls import ToolFormat
from serving.http.body import Body, at_most, limits_of, too_many, unsupported

MOST_BIASES = 1024
"""Limit on the entries of ``logit_bias``."""
MOST_STOP = 4096
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
        if len(value) > 4:
            raise ValueError(f"has {len(value)} entries and the limit is 4")
        size = sum(len(entry) for entry in value if isinstance(entry, str))
        if size > MOST_STOP:
            raise ValueError(f"has {size} characters and the limit is {MOST_STOP}")
    return value


_Stop = Annotated[str, Field(min_length=1)]
_Ids = list[Annotated[int, Field(ge=0)]]
_Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


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

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_LOSSY = "osd.completion.lossy"


class CompletionControl(Body):
    """Probability thresholds above which a controller acts on this completion.

    ``stop``: end a completion that the controller judges to be wrong. The finish reason is ``stop``, and
    ``metrics.completion`` reports it. ``exit``: let drafts leave the target's layers early; this changes the speed
    only. ``lossy``: let the answer itself leave the layers early, if the server allows it. A lossy answer differs from
    the model's own answer, is decoded without drafts, and is not used for learning.
    """

    stop: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    exit: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    lossy: bool | None = None

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
    """Settings of speculative decoding for this request; missing fields use the server's settings.

    All fields except ``completion`` change the speed only. ``speculate`` false turns drafting off. ``domain`` chooses
    the drafter of a domain; without a drafter for that domain, the server uses its default drafter. ``sources`` adds
    the source of each token (``token_sources`` of a choice) and the drafted and accepted tokens of each source
    (``sources`` of the metrics) to the response.
    """

    speculate: bool | None = None
    growth: GrowthSettings | None = None
    verification: Verification | None = None
    domain: str | None = Field(None, pattern=DOMAIN)
    sources: bool | None = None
    completion: CompletionControl | None = None

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


class Generate(Body):
    """Fields that chat and text completions share; null means OpenAI's default.

    Extensions of vLLM: ``top_k`` (0 and -1 turn it off), ``min_p``, ``repetition_penalty``, ``stop_token_ids``,
    ``min_tokens``, ``ignore_eos``, ``priority`` (lower values are served first under load), ``structured_outputs``, and
    ``response_format`` for text completions. Extensions of osd: ``osd``, and ``timeout``, the time limit of the answer
    in seconds from the submission of the prompt to the engine. ``user``, ``safety_identifier``, ``prompt_cache_key``,
    ``prompt_cache_retention``, ``metadata`` and ``service_tier`` are accepted and ignored. With ``seed``, the text
    depends on the prompt, the settings and the seed only, not on drafts. The text does not end within its first
    ``min_tokens`` tokens, unless its required form allows no other token.
    """

    chat: ClassVar[bool] = False

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: Annotated[list[tuple[int, float]] | None, _BIASES] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[_Stop] | None, _STOPS] = None
    stop_token_ids: Annotated[_Ids | None, at_most(MOST_STOP_IDS)] = None
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=8)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    priority: int | None = Field(None, ge=0, le=MOST_PRIORITY)
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: Annotated[_Metadata | None, at_most(MOST_METADATA)] = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    osd: Speculation | None = None

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


_Variables = dict[Annotated[str, Field(max_length=64), AfterValidator(_variable)], str | int | float | bool | None]


class PredictedOutput(Body):
    """Text that the client expects in the answer, such as a file in which only a few lines change.

    Drafts are copied from it; the answer is the same without it. The usage reports how many draft tokens were accepted.
    """

    type: Literal["content"]
    content: Content


class ChatRequest(Generate):
    """Body of ``POST /v1/chat/completions``.

    ``reasoning_effort`` and vLLM's ``chat_template_kwargs`` set variables of the model's chat template, such as
    ``enable_thinking``; a variable that the template does not use is refused.
    """

    neutral = _CHAT_NEUTRAL
    chat = True

    messages: Messages
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prediction: PredictedOutput | None = None
    reasoning_effort: Annotated[str, Field(pattern="^[a-z]{1,16}$")] | None = None
    chat_template_kwargs: Annotated[_Variables | None, at_most(MOST_VARIABLES)] = None

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

    prompt: Annotated[list[str | list[int]], _PROMPTS]
    logprobs: int | None = Field(None, ge=0, le=5)

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
