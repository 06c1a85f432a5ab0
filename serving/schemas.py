"""Request bodies: what is accepted is used, what is not supported is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import TypedDict

from osd.config import DOMAIN, GrowthSettings, ServingSettings, Verification

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
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
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
_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: (None, []) for name in ("name", "refusal", "annotations", "audio", "function_call", "tool_calls")
}


def _equal(value: Any, neutral: Any) -> bool:
    # In JSON 0 and false differ; in Python they do not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class Body(BaseModel):
    """A JSON object with known fields only. Fields in ``neutral`` may say what is done anyway.

    The server's limits of counts are the context of validation, ``ServingSettings``. What is too many, or one of many
    that is wrong, is refused before the rest is looked at.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Tell of neutral fields too."""
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema).setdefault("properties", {})
        fields.update({name: {"enum": list(values)} for name, values in cls.neutral.items()})
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, values in cls.neutral.items():
            if name in data and not any(_equal(data[name], value) for value in values):
                raise PydanticCustomError("unsupported", "'{param}' is not supported.", {"param": name})
        given = {name: value for name, value in data.items() if name not in cls.neutral}
        # The first unknown name is what the refusal tells: a thousand more would only take time.
        unknown = next((name for name in given if name not in cls.model_fields), None)
        return {name: value for name, value in given.items() if name in cls.model_fields or name == unknown}


def _limits(info: ValidationInfo) -> ServingSettings:
    return info.context or ServingSettings()


def _too_many(param: str, count: int, limit: int) -> PydanticCustomError:
    message = "'{param}' has {count} entries and this server's limit is {limit}."
    return PydanticCustomError("too_many", message, {"param": param, "count": count, "limit": limit})


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


def _messages(value: Any, info: ValidationInfo) -> Any:
    limit = _limits(info).max_messages
    if isinstance(value, list) and len(value) > limit:
        raise _too_many("messages", len(value), limit)
    return value


def _text(value: Any) -> Any:
    """Join a message's text parts; other kinds of parts are refused by name."""
    if not isinstance(value, list):
        return value
    parts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            known = kind if kind in ("image_url", "input_audio", "file", "refusal") else "such"
            raise ValueError(f"only text parts are supported, no {known} parts")
        if extra := set(part) - {"type", "text"}:
            raise ValueError(f"a text part has {len(extra)} more field(s) than type and text")
        parts.append(part["text"])
    return "".join(parts)


class TextPart(TypedDict):
    """A part of a message."""

    type: Literal["text"]
    text: str


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
    limit = _limits(info).max_queue
    if len(value) > limit:
        raise _too_many("prompt", len(value), limit)
    for prompt in value:
        ids = isinstance(prompt, list) and set(map(type, prompt)) <= {int} and min(prompt, default=0) >= 0
        if not (isinstance(prompt, str) or ids):
            raise ValueError("must be a text, a list of token ids, or a list of these")
    return value


_STOPS = BeforeValidator(_stops, json_schema_input_type=_Stop | list[_Stop] | None)
_CONTENT = BeforeValidator(_text, json_schema_input_type=str | list[TextPart])
_BIASES = BeforeValidator(_biases, json_schema_input_type=dict[str, float] | None)
_PROMPTS = BeforeValidator(_prompts, json_schema_input_type=str | _Ids | list[str | _Ids])


class StreamOptions(Body):
    """What a stream reports beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(Body):
    """How this request speculates; what is left out is as the server has it. It changes speed and nothing else.

    ``speculate`` false decodes plainly. ``domain`` names whose drafter is wanted; one that has none is served by the
    server's own.
    """

    speculate: bool | None = None
    growth: GrowthSettings | None = None
    verification: Verification | None = None
    domain: str | None = Field(None, pattern=DOMAIN)

    @model_validator(mode="after")
    def _not_governed(self) -> Speculation:
        # The governor plans what the server drafts by itself; a request gets what it asks for.
        if self.growth is not None and "governed" in self.growth.model_fields_set:
            raise PydanticCustomError("unsupported", "'{param}' is not supported.", {"param": "osd.growth.governed"})
        return self


class Generate(Body):
    """What chat and text completions share; ``None`` is the default of OpenAI.

    ``top_k`` (0 and -1 are off), ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``min_tokens`` and
    ``ignore_eos`` are vLLM's extensions. Ours is ``timeout``: the seconds that the answer may take, from where the
    prompt has been read. ``user`` is taken as a label and not kept. With ``seed`` the text depends on prompt, settings
    and seed alone, and not on what was drafted. No end of the text comes among its first ``min_tokens`` tokens.
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
    store: bool | None = None
    user: str | None = None
    osd: Speculation | None = None

    @property
    def limit(self) -> tuple[int | None, str]:
        """How many tokens a completion may have at most, None when nobody says, and the field that says so."""
        return self.max_tokens, "max_tokens"

    @property
    def top(self) -> int | None:
        """How many most probable tokens to report beside each token; None to report no log-probabilities."""
        return None

    @model_validator(mode="after")
    def _streams(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported", "'{param}' is only supported with stream.", {"param": "stream_options"}
            )
        return self


class Message(Body):
    """One turn of a chat."""

    neutral = _MESSAGE_NEUTRAL

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, _CONTENT]


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_messages)]
"""The turns of a chat, as many as the server allows."""


class ChatRequest(Generate):
    """``POST /v1/chat/completions``."""

    neutral = _CHAT_NEUTRAL
    chat = True

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> tuple[int | None, str]:
        """See ``Generate``."""
        both = (self.max_completion_tokens, "max_completion_tokens"), (self.max_tokens, "max_tokens")
        return both[0] if self.max_completion_tokens else both[1]

    @property
    def top(self) -> int | None:
        """See ``Generate``."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "unsupported", "'{param}' is only supported with logprobs.", {"param": "top_logprobs"}
            )
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "unsupported", "'{param}' differs from 'max_completion_tokens'.", {"param": "max_tokens"}
            )
        return self


class CompletionRequest(Generate):
    """``POST /v1/completions``; several prompts give ``n`` choices each."""

    neutral = _COMPLETION_NEUTRAL

    prompt: Annotated[list[str | list[int]], _PROMPTS]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def top(self) -> int | None:
        """See ``Generate``."""
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
            raise PydanticCustomError("unsupported", "Give either '{param}' or 'messages'.", {"param": "prompt"})
        return self


class DetokenizeRequest(Body):
    """``POST /detokenize``: the text of token ids."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]] = Field(fail_fast=True)
