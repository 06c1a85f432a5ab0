"""Prompts from a file of JSON lines: ``{"id", "domain", "messages": [{"role", "content"}, ...]}``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from osd.traffic.prompt import Prompt, TrafficError

_Text = Annotated[str, Field(min_length=1)]


class _Message(BaseModel):
    role: Literal["user", "system"]
    content: _Text


class _Record(BaseModel):
    id: _Text
    domain: _Text
    messages: list[_Message] = Field(min_length=1)


def read(path: Path) -> list[Prompt]:
    """Read every prompt of a file, in its order.

    Raises:
        TrafficError: the file cannot be read or holds no prompt, or a line of it is wrong; names line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a string may hold other line separators
    except OSError as error:
        raise TrafficError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TrafficError(f"{path} is not UTF-8 text") from None
    prompts = [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise TrafficError(f"{path} holds no prompt")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = _Record.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
        reason = "not JSON" if first["type"] == "json_invalid" else first["msg"]
        raise TrafficError(f"{where}{', field ' * bool(field)}{field}: {reason}") from None
    system, *later = (message.role == "system" for message in record.messages)
    if any(later):
        raise TrafficError(f"{where}, field messages[{later.index(True) + 1}].role: system may only come first")
    turns = tuple(message.content for message in record.messages[system:])
    if not turns:
        raise TrafficError(f"{where}, field messages: holds no user message")
    return Prompt(record.id, record.domain, turns, record.messages[0].content if system else None)
