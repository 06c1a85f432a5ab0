"""Request bodies: what is accepted is used, what is not supported is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from osd.config import DOMAIN, GrowthSettings, Verification
from serving.access.keys import MOST_PRIORITY
from serving.api.messages import Function, Messages, ToolChoice, Tools
from serving.api.structured import ResponseFormat, Structure, StructuredOutputs
from serving.api.tool_calls import ToolFormat
from serving.http.body import Body, limits_of, too_many, unsupported

MOST_BIASES = 1024
"""Entries of ``logit_bias`` at most."""
MOST_STOP = 4096
"""Characters of all ``stop`` strings together at most."""
MOST_STOP_IDS = 64
"""Entries of ``stop_token_ids`` at most."""

_COMMON_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": (None, "auto", "default"),
    "metadata": (None,),
}
_CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_COMMON_NEUTRAL,
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "reasoning_effort": (None, "none"),
    "audio": (None,),
    "prediction": (None,),
}
_COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_COMMON_NEUTRAL,
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
        size = sum(len(one) for one in value if isinstance(one, str))
        if size > MOST_STOP:
            raise ValueError(f"has {size} characters and the limit is {MOST_STOP}")
    return value


def _stop_ids(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MOST_STOP_IDS:
        raise ValueError(f"has {len(value)} entries and the limit is {MOST_STOP_IDS}")
    return value


_Stop = Annotated[str, Field(min_length=1)]
_Ids = list[Annotated[int, Field(ge=0)]]


def _biases(value: Any) -> Any:
    """A JSON object from token ids to numbers, as pairs."""
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
    """One text, one list of token ids, or a list of either."""
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
    """What a stream reports beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_LOSSY = "osd.completion.lossy"


class Judgement(Body):
    """What a controller may decide about this completion, by the probability above which it counts.

    ``stop`` ends one that is judged to go wrong, with the finish reason ``stop``; ``metrics.completion`` then says so.
    ``exit`` lets its drafts leave the target's layers early, which changes speed and nothing else. With ``lossy`` the
    answer itself leaves there, where the server allows that: it is not the model's own, and nothing is drafted for it
    or learnt from it.
    """

    stop: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    exit: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    lossy: bool | None = None

    @property
    def asked(self) -> str | None:
        """The first threshold that is given, None for none."""
        return next((name for name in ("stop", "exit") if getattr(self, name) is not None), None)

    @model_validator(mode="after")
    def _leaves_somewhere(self) -> Judgement:
        if self.lossy and self.exit is None:
            raise unsupported(_LOSSY, "'{param}' is not supported without 'osd.completion.exit'.")
        return self


class Speculation(Body):
    """How this request speculates; what is left out is as the server has it.

    It changes speed and nothing else, but for ``completion``. ``speculate`` false decodes plainly. ``domain`` names
    whose drafter is wanted; one that has none is served by the server's own. With ``sources`` the answer says who each
    token comes from, as ``token_sources`` of a choice, and how many draft tokens of each were accepted, as ``sources``
    of its metrics.
    """

    speculate: bool | None = None
    growth: GrowthSettings | None = None
    verification: Verification | None = None
    domain: str | None = Field(None, pattern=DOMAIN)
    sources: bool | None = None
    completion: Judgement | None = None

    @property
    def stop(self) -> float | None:
        """The probability above which a completion ends that is judged to go wrong, None for never."""
        return None if self.completion is None else self.completion.stop

    @property
    def lossy(self) -> bool:
        """Whether the answer may leave the target early."""
        return self.completion is not None and bool(self.completion.lossy)

    @model_validator(mode="after")
    def _fits(self) -> Speculation:
        # Nothing is drafted for what leaves by itself.
        for name in ("growth", "verification"):
            if self.lossy and getattr(self, name) is not None:
                raise unsupported(f"osd.{name}", f"'{{param}}' is not supported with '{_LOSSY}'.")
        asked = None if self.completion is None else self.completion.asked
        if asked is not None and self.speculate is False:
            # What judges is the drafter.
            param = f"osd.completion.{asked}"
            raise unsupported(param, "'{param}' is not supported where 'osd.speculate' is false.")
        # The governor plans what the server drafts by itself; a request gets what it asks for.
        if self.growth is not None and "governed" in self.growth.model_fields_set:
            raise unsupported("osd.growth.governed")
        return self


class Generate(Body):
    """What chat and text completions share; ``None`` is the default of OpenAI.

    ``top_k`` (0 and -1 are off), ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``min_tokens`` and
    ``ignore_eos`` are vLLM's extensions, and so is ``priority``: the more, the later it comes where not all can run.
    Ours is ``timeout``: the seconds that the answer may take, from where the prompt has been read. ``user`` is taken as
    a label and not kept. With ``seed`` the text depends on prompt, settings and seed alone, and not on what was
    drafted. No end of the text comes among its first ``min_tokens`` tokens, unless its form leaves nothing else.
    ``response_format`` on text completions and ``structured_outputs`` are vLLM's too.
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
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]] | None, BeforeValidator(_stop_ids)] = None
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=8)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    priority: int | None = Field(None, ge=0, le=MOST_PRIORITY)
    store: bool | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    osd: Speculation | None = None

    @property
    def structure(self) -> Structure | None:
        """What the answer has to look like, None for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure
        return None if self.response_format is None else self.response_format.structure

    @property
    def callable(self) -> list[Function]:
        """The functions that the model may call."""
        return []

    def structure_of(self, calls: ToolFormat) -> Structure | None:
        """What an answer has to look like that may call functions so, None where that is left to the model."""
        return None

    @property
    def limit(self) -> tuple[int | None, str]:
        """How many tokens a completion may have at most, None when nobody says, and the field that says so."""
        return self.max_tokens, "max_tokens"

    @property
    def top(self) -> int | None:
        """How many most probable tokens to report beside each token; None to report no log-probabilities."""
        return None

    @property
    def credits(self) -> bool:
        """Whether to report who each token comes from."""
        return self.osd is not None and bool(self.osd.sources)

    @model_validator(mode="after")
    def _fits(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "'{param}' is only supported with stream.")
        other = None if self.response_format is None else self.response_format.structure
        if self.structured_outputs is not None and other is not None:
            raise unsupported("structured_outputs", "'{param}' is not supported together with 'response_format'.")
        if self.structure is not None and self.ignore_eos:
            # A form has an end, and nothing can follow it.
            raise unsupported("ignore_eos", "'{param}' is not supported where the form of the answer is given.")
        if (self.structure is not None or self.callable) and self.osd is not None and self.osd.stop is not None:
            # An answer that ends by ``stop`` is complete.
            raise unsupported(
                "osd.completion.stop",
                "'{param}' is not supported where the form of the answer is given, nor with tools.",
            )
        lossy = self.osd is not None and self.osd.lossy
        if lossy and (self.structure is not None or self.callable):
            # What reads a token where it leaves does not know all tokens that a form may want.
            message = "'{param}' is not supported where the form of the answer is given, nor with tools."
            raise unsupported(_LOSSY, message)
        if lossy and self.store:
            raise unsupported("store", f"'{{param}}' is not supported with '{_LOSSY}', as nobody learns from that.")
        return self


class ChatRequest(Generate):
    """``POST /v1/chat/completions``."""

    neutral = _CHAT_NEUTRAL
    chat = True

    messages: Messages
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

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
    def called(self) -> list[Function]:
        """The functions of which one has to be called, none where the model may also answer with text."""
        if self.tool_choice is None or self.tool_choice.type in ("none", "auto"):
            return []
        wanted = self.tool_choice.function
        return [one for one in self.callable if wanted is None or one.name == wanted.name]

    def structure_of(self, calls: ToolFormat) -> Structure | None:
        """See ``Generate``: it is left to the model but for calls that are asked for, strict, or one at most."""
        if not (self.called or self.parallel_tool_calls is False or any(one.strict for one in self.callable)):
            return None
        functions = {one.name: one.arguments for one in self.called or self.callable}
        named = self.tool_choice is not None and self.tool_choice.function is not None
        several = self.parallel_tool_calls is not False and not named
        return Structure("tools", "grammar", calls.grammar(functions, several, free=not self.called))

    @model_validator(mode="after")
    def _fits_a_chat(self) -> ChatRequest:
        asked = self.tool_choice is not None and self.tool_choice.type not in ("none", "auto")
        if asked and not self.called:
            raise PydanticCustomError("no_such", "'{param}' names no function of 'tools'.", {"param": "tool_choice"})
        if self.callable and self.structure is not None:
            raise unsupported("tools", "'{param}' is not supported where the form of the answer is given.")
        if self.called and self.ignore_eos:
            raise unsupported("ignore_eos", "'{param}' is not supported where a function has to be called.")
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "'{param}' is only supported with logprobs.")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise unsupported("max_tokens", "'{param}' differs from 'max_completion_tokens'.")
        return self


class CompletionRequest(Generate):
    """``POST /v1/completions``; several prompts give ``n`` choices each."""

    neutral = _COMPLETION_NEUTRAL

    prompt: Annotated[list[str | list[int]], _PROMPTS]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def top(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Body):
    """``POST /tokenize``: the token ids of a text or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise unsupported("prompt", "Give either '{param}' or 'messages'.")
        return self


class DetokenizeRequest(Body):
    """``POST /detokenize``: the text of token ids."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]] = Field(fail_fast=True)
