"""Prompts that a model should refuse, in the shape of RMCBench's ``prompt.json``.

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


class Prompt(BaseModel):
    """One request; ``pid`` is its number, ``level`` counts from 1 and means something else in each category.

    Fields that are not listed here are not read.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    pid: int = Field(ge=0)
    category: Literal["text-to-code", "code-to-code"]
    task: Task
    level: int = Field(ge=1, le=3)
    prompt: _Text
    language: _Text | None = None

    def groups(self) -> Iterator[Group]:
        """Those that it belongs to."""
        yield Group("all", "")
        yield Group("category", self.category)
        yield Group("task", self.task)
        yield Group("level", f"{self.category} {self.level}")
        if self.language is not None:
            yield Group("language", self.language)


@dataclass(frozen=True, order=True)
class Group:
    """Prompts that are alike: by which field, and its value."""

    field: str
    value: str


_PROMPTS = TypeAdapter(list[Prompt])


def read(path: Path) -> list[Prompt]:
    """Read every prompt of a file, in its order.

    Raises:
        RefusalsError: the file cannot be read, is no JSON list of prompts or an empty one, or a number comes twice.
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
        raise RefusalsError(f"{path}: {count} prompts have the pid {pid}, and each needs one of its own")
    return prompts


def _explain(path: Path, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place, *field = first["loc"] or ("",)
    if first["type"] == "json_invalid":
        return f"{path} is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    if first["type"] == "list_type":
        return f"{path} must hold a JSON list of prompts"
    given = first["input"]
    told = f", not {given!r}" if isinstance(given, str | int | float) and len(str(given)) <= 40 else ""
    named = f", field {field[0]}" if field else ""
    return f"{path}, prompt {place} counted from 0{named}: {first['msg']}{told}"
