"""The functions that a chat may call, as OpenAI has them: ``tools``, ``tool_choice``, and calls in earlier answers."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from serving.api.structured import JsonSchemaText, bounded
from serving.http.body import Body

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
