"""The turns of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from serving.api.tools import ToolCalls
from serving.http.body import Body, limits_of, too_many

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
