"""Messages of a chat, the functions that the model may call, and calls in earlier answers."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from osd.nesting import MAX_DEPTH, check_nesting
from serving.api.structured import MOST_TEXT, JsonSchemaText, check_size
from serving.http.body import VLLM, Body, at_most, limits_of, too_many

MOST_TOOLS = 128
"""Limit on the entries of ``tools`` and of the ``tool_calls`` of a message."""
_ANYTHING: dict[str, Any] = {"type": "object"}

Name = Annotated[
    str,
    Field(pattern="^[a-zA-Z0-9_-]{1,64}$", description="name of a function, 1 to 64 of A-Z, a-z, 0-9, _ and -"),
]
"""Name of a function."""


class Function(Body):
    """Function that the model may call."""

    name: Name
    description: str | None = Field(None, description="purpose of the function, for the model")
    parameters: JsonSchemaText | None = Field(
        None,
        description=f"JSON Schema of the arguments, which are an object; at most {MOST_TEXT} characters; by default "
        "any object",
    )
    strict: bool | None = Field(
        None,
        description="restrict the arguments to parameters also where no call is required",
        json_schema_extra={"default": False},
    )

    @property
    def template(self) -> dict[str, Any]:
        """Fields ``name``, ``description`` and ``parameters`` for a chat template, without the ``type`` of a tool."""
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **described, "parameters": self.arguments}

    @property
    def arguments(self) -> dict[str, Any]:
        """JSON Schema of the arguments, which are an object also if ``parameters`` does not say so."""
        return {**_ANYTHING, **(self.parameters or {})}

    @field_validator("parameters")
    @classmethod
    def _describes_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if (kind := (parameters or {}).get("type", "object")) != "object":
            raise ValueError(f"must describe an object, and its type is {str(kind)[:32]}")
        return parameters


class Tool(Body):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function = Field(description="function that the model may call")


class _FunctionName(Body):
    name: Name


class NamedTool(Body):
    """Function that the model must call."""

    type: Literal["function"]
    function: _FunctionName = Field(description="function that the model must call, one of tools")


class ToolChoiceMode(Body):
    """Choice whether the model may or must call a function, and which function; None for any function."""

    type: Literal["none", "auto", "required", "function"]
    function: _FunctionName | None = None


def _arguments(value: str) -> str:
    check_nesting(value)
    return value


class PastFunctionCall(Body):
    """Name and arguments of a call in an earlier answer."""

    name: Name
    arguments: Annotated[str, AfterValidator(_arguments)] = Field(
        description=f"arguments as a JSON text, nested at most {MAX_DEPTH} levels deep"
    )


class ToolCall(Body):
    """Call in an earlier answer."""

    id: str = Field(description="id of the call")
    index: int | None = Field(None, description="place of a streamed call; accepted and ignored")
    type: Literal["function"] = "function"
    function: PastFunctionCall = Field(description="function that was called")

    @property
    def template(self) -> dict[str, Any]:
        """Call in the format of chat templates; arguments that are valid JSON become an object."""
        try:
            arguments = json.loads(self.function.arguments)
            json.dumps(arguments, ensure_ascii=False).encode()  # half a surrogate pair is no text for a tokenizer
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def _check_tools(value: list[Tool] | None) -> list[Tool] | None:
    check_size(sum(len(json.dumps(tool.function.arguments)) for tool in value or ()))
    seen: set[str] = set()
    for number, tool in enumerate(value or ()):
        if tool.function.name in seen:
            raise ValueError(f"names the function of entry {number} a second time")
        seen.add(tool.function.name)
    return value


def _choice(value: Any) -> Any:
    """Return the ``tool_choice`` as an object, given a mode or an object that names a function."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value and {"type": value}
    if not (isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict)):
        raise ValueError("must be none, auto, required or the name of a function")
    return value


Tools = Annotated[list[Tool] | None, AfterValidator(_check_tools), at_most(MOST_TOOLS)]
ToolCalls = Annotated[list[ToolCall] | None, at_most(MOST_TOOLS)]
ToolChoice = Annotated[
    ToolChoiceMode | None,
    BeforeValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | None),
]


_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: (None, []) for name in ("refusal", "annotations", "audio", "function_call")
}


def _messages(value: Any, info: ValidationInfo) -> Any:
    limit = limits_of(info).max_messages
    if isinstance(value, list) and len(value) > limit:
        raise too_many("messages", len(value), limit)
    return value


def _text(value: Any) -> Any:
    """Join the text parts of a message; other kinds of parts are errors."""
    if not isinstance(value, list):
        return value
    parts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            known = f"{kind} parts" if kind in ("image_url", "input_audio", "file", "refusal") else "other parts"
            raise ValueError(f"only text parts are supported, not {known}")
        if extra := set(part) - {"type", "text"}:
            raise ValueError(f"a text part has {len(extra)} more field(s) than type and text")
        parts.append(part["text"])
    return "".join(parts)


class TextPart(TypedDict):
    """Text part of a message."""

    type: Literal["text"]
    text: Annotated[str, Field(description="text of the part; the texts of all parts are joined")]


_CONTENT = BeforeValidator(_text, json_schema_input_type=str | list[TextPart])

Content = Annotated[str, _CONTENT]
"""Text, or a list of its parts."""


class Message(Body):
    """Message of a chat."""

    neutral = _MESSAGE_NEUTRAL

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="author of the message; developer is shown to the model as system"
    )
    reasoning_content: str | None = Field(
        None,
        description="thinking of an earlier answer, if the chat template shows it to the model",
        json_schema_extra=VLLM,
    )
    name: str | None = Field(None, description="name of the author, if the chat template shows it to the model")
    tool_calls: ToolCalls = Field(
        None, description=f"calls in an earlier answer, only with the role assistant; at most {MOST_TOOLS}"
    )
    tool_call_id: str | None = Field(
        None, description="id of the call whose result this is; required with the role tool, and only allowed there"
    )
    content: Annotated[str | None, _CONTENT] = Field(
        None, validate_default=True, description="text, or list of text parts; required without tool_calls"
    )

    @field_validator("content")
    @classmethod
    def _has_content(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return content

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the role assistant may have 'tool_calls'")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of the role tool needs 'tool_call_id', and other messages must not have it")
        return self

    @property
    def template(self) -> dict[str, Any]:
        """Message in the format of chat templates, which use the role ``system`` for ``developer``."""
        turn: dict[str, Any] = {"role": self.role.replace("developer", "system"), "content": self.content or ""}
        if self.tool_calls:
            turn["tool_calls"] = [call.template for call in self.tool_calls]
        more = {
            "name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content
        }  # fmt: skip
        return turn | {name: value for name, value in more.items() if value is not None}

    @property
    def calls(self) -> bool:
        """Whether the message calls a function or holds the result of a call."""
        return bool(self.tool_calls) or self.role == "tool"


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(_messages)]
"""Messages of a chat, at most the server's limit."""
