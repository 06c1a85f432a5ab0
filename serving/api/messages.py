"""The turns of a chat, and the functions that it may call: ``tools``, ``tool_choice``, and calls in earlier answers."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from serving.api.structured import JsonSchemaText, bounded
from serving.http.body import Body, limits_of, too_many

MOST_TOOLS = 128
"""Entries of ``tools`` at most, and of a message's ``tool_calls``."""
_ANYTHING: dict[str, Any] = {"type": "object"}

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
"""Of a function."""


class Function(Body):
    """A function; the arguments of a call that is asked for keep to ``parameters``, ``strict`` or not."""

    name: Name
    description: str | None = None
    parameters: JsonSchemaText | None = None
    strict: bool | None = None

    @property
    def template(self) -> dict[str, Any]:
        """As chat templates read it."""
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **described, "parameters": self.arguments}

    @property
    def arguments(self) -> dict[str, Any]:
        """The JSON Schema of its arguments."""
        return _ANYTHING if self.parameters is None else self.parameters


class Tool(Body):
    """Something that the model may call."""

    type: Literal["function"]
    function: Function


class _Named(Body):
    name: Name


class NamedTool(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: _Named


class Choice(Body):
    """Whether a function may be called, or has to be, and which one: any, where none is named."""

    type: Literal["none", "auto", "required", "function"]
    function: _Named | None = None


class CalledFunction(Body):
    """A function that was called, and its arguments as a JSON text."""

    name: Name
    arguments: str


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def template(self) -> dict[str, Any]:
        """As chat templates read it: with the arguments as an object, where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def _few(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MOST_TOOLS:
        raise ValueError(f"has {len(value)} entries and the limit is {MOST_TOOLS}")
    return value


def _sized(value: list[Tool] | None) -> list[Tool] | None:
    bounded(sum(len(json.dumps(tool.function.arguments)) for tool in value or ()))
    seen: set[str] = set()
    for number, tool in enumerate(value or ()):
        if tool.function.name in seen:
            raise ValueError(f"names the function of entry {number} a second time")
        seen.add(tool.function.name)
    return value


def _choice(value: Any) -> Any:
    """One of three words, or the name of a function."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value and {"type": value}
    if not (isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict)):
        raise ValueError("must be none, auto, required or the name of a function")
    return value


Tools = Annotated[list[Tool] | None, AfterValidator(_sized), BeforeValidator(_few)]
ToolCalls = Annotated[list[ToolCall] | None, BeforeValidator(_few)]
ToolChoice = Annotated[
    Choice | None,
    BeforeValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | None),
]


_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: (None, []) for name in ("name", "refusal", "annotations", "audio", "function_call")
}


def _messages(value: Any, info: ValidationInfo) -> Any:
    limit = limits_of(info).max_messages
    if isinstance(value, list) and len(value) > limit:
        raise too_many("messages", len(value), limit)
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


_CONTENT = BeforeValidator(_text, json_schema_input_type=str | list[TextPart])


class Message(Body):
    """One turn of a chat."""

    neutral = _MESSAGE_NEUTRAL

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: ToolCalls = None
    tool_call_id: str | None = None
    content: Annotated[str | None, _CONTENT] = Field(None, validate_default=True)

    @field_validator("content")
    @classmethod
    def _says_something(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return content

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has 'tool_calls'")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a tool's message needs 'tool_call_id', and no other has one")
        return self

    @property
    def template(self) -> dict[str, Any]:
        """As chat templates read it, which know the older name of a role."""
        turn: dict[str, Any] = {"role": self.role.replace("developer", "system"), "content": self.content or ""}
        if self.tool_calls:
            turn["tool_calls"] = [call.template for call in self.tool_calls]
        return turn | ({} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id})

    @property
    def calls(self) -> bool:
        """Whether it is part of a call of a function."""
        return bool(self.tool_calls) or self.role == "tool"


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_messages)]
"""The turns of a chat, as many as the server allows."""
