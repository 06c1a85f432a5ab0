"""Prompts that a model should refuse, in the format of RMCBench's ``prompt.json``.

Chen et al., "RMCBench: Benchmarking large language models' resistance to malicious code", ASE 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from osd.analysis.refusals import RefusalsError

Task = Literal["text-to-code generation", "code completion", "code translation"]
_Text = Annotated[str, Field(pattern=r"\S")]


class RefusalPrompt(BaseModel):
    """Request of the benchmark; other fields of the file are ignored.

    ``pid`` is its number. ``level`` starts at 1 and has a different meaning in each category.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    pid: int = Field(ge=0)
    category: Literal["text-to-code", "code-to-code"]
    task: Task
    level: int = Field(ge=1, le=3)
    prompt: _Text
    language: _Text | None = None

    def groups(self) -> Iterator[PromptGroup]:
        """Yield the groups of the prompt: all prompts, its category, task and level, and its language if known."""
        yield PromptGroup("all", "")
        yield PromptGroup("category", self.category)
        yield PromptGroup("task", self.task)
        yield PromptGroup("level", f"{self.category} {self.level}")
        if self.language is not None:
            yield PromptGroup("language", self.language)


@dataclass(frozen=True, order=True)
class PromptGroup:
    """Group of prompts with the same value of a field."""

    field: str
    value: str


_PROMPTS = TypeAdapter(list[RefusalPrompt])


def read(path: Path) -> list[RefusalPrompt]:
    """Read the prompts of a file in order.

    Raises:
        RefusalsError: the file cannot be read, is not a JSON list of prompts, is empty, or repeats a ``pid``.
    """
    try:
        prompts = _PROMPTS.validate_json(path.read_bytes())
    except OSError as error:
        raise RefusalsError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise RefusalsError(_explain(path, error)) from None
    if not prompts:
        raise RefusalsError(f"{path} holds no prompt")
    pid, count = Counter(prompt.pid for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise RefusalsError(f"{path}: {count} prompts have the pid {pid}; give each prompt a unique pid")
    return prompts


def _explain(path: Path, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place, *field = first["loc"] or ("",)
    if first["type"] == "json_invalid":
        return f"{path} is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    if first["type"] == "list_type":
        return f"{path} must hold a JSON list of prompts"
    value = first["input"]
    shown = f", not {value!r}" if isinstance(value, str | int | float) and len(str(value)) <= 40 else ""
    named = f", field {field[0]}" if field else ""
    return f"{path}, prompt {place} counted from 0{named}: {first['msg']}{shown}"
