"""Sources of prompts, and a client that sends them with realistic arrival times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from osd.traffic import stdlib
from osd.traffic.prompt import Prompt, TrafficError

_Text = Annotated[str, Field(min_length=1)]


class _Message(BaseModel):
    role: Literal["user", "system"]
    content: _Text


class _Record(BaseModel):
    id: _Text
    domain: _Text
    messages: list[_Message] = Field(min_length=1)


SOURCES: dict[str, Callable[[], list[Prompt]]] = {
    "unittest": stdlib.unit_tests,
    "stdlib": stdlib.prompts,
    "pydoc": stdlib.prose,
}
"""Built-in sources, which need no file."""


def load(source: str) -> list[Prompt]:
    """Return the prompts of a built-in source or of a JSON lines file, always in the same order.

    Raises:
        TrafficError: there is no such source or file, or a line of the file is not a prompt.
    """
    if source in SOURCES:
        return SOURCES[source]()
    path = Path(source)
    if not path.is_file():
        raise TrafficError(f"{source} is neither a file nor one of {', '.join(SOURCES)}")
    return read(path)


def read(path: Path) -> list[Prompt]:
    """Return every prompt of a JSON lines file: ``{"id", "domain", "messages": [{"role", "content"}, ...]}``.

    Raises:
        TrafficError: the file cannot be read, holds no prompt, or a line is not a prompt.
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
