"""Prompts from a file of JSON lines: ``{"id", "domain", "messages": [{"role", "content"}, ...]}``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from osd.traffic.prompt import Prompt, TrafficError


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
        record = json.loads(line)
    except ValueError as error:
        raise TrafficError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise TrafficError(f"{where}: must be an object with id, domain and messages")
    for field in ("id", "domain"):
        if not isinstance(record.get(field), str) or not record[field]:
            raise TrafficError(f"{where}, field {field}: must be a text")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise TrafficError(f"{where}, field messages: must be a list of at least one message")
    system, turns = None, []
    for number, message in enumerate(messages):
        role, content = _message(message, f"{where}, field messages[{number}]")
        if role == "user":
            turns.append(content)
        elif number == 0:
            system = content
        else:
            raise TrafficError(f"{where}, field messages[{number}].role: system may only come first")
    if not turns:
        raise TrafficError(f"{where}, field messages: holds no user message")
    return Prompt(record["id"], record["domain"], tuple(turns), system)


def _message(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise TrafficError(f"{where}: must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "system"):
        raise TrafficError(f"{where}.role: must be user or system, answers come from the model")
    if not isinstance(content, str) or not content:
        raise TrafficError(f"{where}.content: must be a text")
    return role, content
