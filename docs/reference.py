"""Tables of the documentation as Markdown: ``python -m docs.reference settings``, or another page of ``PAGES``."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from osd.config.base import Section
from osd.config.settings import Settings
from serving.api.schemas import ChatRequest, CompletionRequest, Generate
from serving.http.body import Body
from serving.metrics.table import TABLE

_LIMITS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_SCHEMA_LIMITS = {
    "minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}", "exclusiveMaximum": "below {}"
}  # fmt: skip


def settings(keys: Iterable[str]) -> str:
    """Return the tables of settings: one for each section, and one for the kinds of a section.

    Args:
        keys: the settings without a section, and the sections.
    """
    fields = {key: Settings.model_fields[key] for key in keys}
    lines = list(_table("", {key: field for key, field in fields.items() if not _sections(field.annotation)}))
    for key, field in fields.items():
        sections = _sections(field.annotation)
        if len(sections) > 1:
            lines += _kinds(key, field)
        elif sections:
            lines += [f"## `{key}`", "", _purpose(sections[0]), "", *_table(f"{key}.", sections[0].model_fields)]
    return "\n".join(lines)


def metrics() -> str:
    """Return the table of all metrics, sorted by name."""
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for row in sorted(TABLE, key=lambda row: row.name):
        name = f"{row.name}_total" if row.kind == "counter" else row.name
        lines.append(f"| `{name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.help} |")
    return "\n".join(lines) + "\n"


def http_fields() -> str:
    """Return tables of the fields of requests: those of both paths, of chats alone, and of text completions alone."""
    lines = list(_fields_table("Chat and text completions", Generate, ()))
    lines += _fields_table("Chat completions", ChatRequest, Generate.model_fields)
    lines += _fields_table("Text completions", CompletionRequest, Generate.model_fields)
    return "\n".join(lines)


def _fields_table(title: str, model: type[Body], without: Collection[str]) -> Iterator[str]:
    """Yield the table of the fields of ``model`` that are not in ``without``."""
    schema = model.model_json_schema()
    properties = {name: field for name, field in schema["properties"].items() if name not in without}
    yield from (f"## {title}", "", "| field | API | default | meaning |", "|---|---|---|---|")
    yield from _fields("", {**schema, "properties": properties}, schema.get("$defs", {}), "OpenAI")
    yield ""


def _fields(prefix: str, schema: dict[str, Any], types: dict[str, Any], api: str) -> Iterator[str]:
    """Yield a row for each field of an object and of the objects in it.

    Args:
        prefix: text before the names of the fields.
        schema: JSON Schema of the object.
        types: schemas by name.
        api: origin of fields that name none.
    """
    for key, field in schema["properties"].items():
        name, source, parts = f"{prefix}{key}", field.get("x-api", api), [field, *field.get("anyOf", ())]
        required, default = key in schema.get("required", ()), field.get("default")
        stated = "required" if required else "" if default is None else f"`{json.dumps(default)}`"
        yield f"| `{name}` | {source} | {stated} | {_field_meaning(field, parts)} |"
        for part in parts:
            reference = part.get("$ref") or part.get("items", {}).get("$ref")
            if reference:
                inner = f"{name}[]." if "items" in part else f"{name}."
                yield from _fields(inner, types[reference.rpartition("/")[2]], types, source)


def _field_meaning(field: dict[str, Any], parts: list[dict[str, Any]]) -> str:
    """Return description, values and limits of a field, given its schema and those of its alternatives."""
    texts = [field["description"]] if "description" in field else []
    for part in parts:
        values = [f"`{json.dumps(value)}`" for value in part.get("enum", [part["const"]] if "const" in part else ())]
        texts += [f"one of {', '.join(values)}" if len(values) > 1 else f"only {values[0]}"] if values else []
        texts += [words.format(part[name]) for name, words in _SCHEMA_LIMITS.items() if name in part]
    return "; ".join(texts).replace("|", "\\|")


def _table(prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Yield the table of the settings in ``fields``, then the tables of those that have kinds."""
    with_kinds = {key: field for key, field in fields.items() if len(_sections(field.annotation)) > 1}
    rows = list(_rows(prefix, {key: field for key, field in fields.items() if key not in with_kinds}))
    if rows:
        yield from ("| setting | default | meaning |", "|---|---|---|")
        yield from (f"| `{name}` | {default} | {meaning} |" for name, default, meaning in rows)
        yield ""
    for key, field in with_kinds.items():
        yield from _kinds(f"{prefix}{key}", field)


def _kinds(name: str, field: FieldInfo) -> Iterator[str]:
    """Yield a table of the kinds of a setting, and a table of the settings of all kinds."""
    sections = {_kind(section): section for section in _sections(field.annotation)}
    default = field.get_default(call_default_factory=True).kind
    yield from (f"## `{name}.kind`", "", "| kind | meaning |", "|---|---|")
    for kind, section in sections.items():
        yield f"| `{kind}`{' (default)' if kind == default else ''} | {_purpose(section)} |"
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for kind, section in sections.items():
        for row in _rows(f"{name}.", section.model_fields):
            kinds.setdefault(row, []).append(f"`{kind}`")
    yield from ("", "| setting | kinds | default | meaning |", "|---|---|---|---|")
    for (setting, value, meaning), names in sorted(kinds.items()):
        yield f"| `{setting}` | {'all' if len(names) == len(sections) else ', '.join(names)} | {value} | {meaning} |"
    yield ""


def _rows(prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and meaning of each setting in ``fields`` and in their sections."""
    for key, field in fields.items():
        name, sections = f"{prefix}{key}", _sections(field.annotation)
        if len(sections) > 1:
            default = field.get_default(call_default_factory=True).kind
            yield f"{name}.kind", f"`{default}`", f"one of {', '.join(f'`{_kind(section)}`' for section in sections)}"
        elif sections:
            yield from _rows(f"{name}.", sections[0].model_fields)
        elif key != "kind" or len(list(_choices(field.annotation))) > 1:  # the kind of a class has one value
            yield name, _default(field), _meaning(field)


def _kind(section: type[Section]) -> str:
    return section.model_fields["kind"].default


def _purpose(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _sections(annotation: Any) -> list[type[Section]]:
    """Return the classes of a setting that is a section; several classes are its kinds."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return [section for part in get_args(annotation) for section in _sections(part)]
    return []


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _meaning(field: FieldInfo) -> str:
    parts = [" ".join(field.description.split())] if field.description else []
    choices = list(_choices(field.annotation))
    if choices:
        parts.append("one of " + ", ".join(f"`{choice}`" for choice in choices))
    for limit in field.metadata:
        parts += [words.format(getattr(limit, name)) for name, words in _LIMITS.items() if hasattr(limit, name)]
    return "; ".join(parts).replace("|", "\\|")


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from _choices(part)


_DRAFTERS, _TRAINING = ("drafter", "growth"), ("trainer", "economy")

PAGES = {
    "settings": partial(settings, [key for key in Settings.model_fields if key not in _DRAFTERS + _TRAINING]),
    "settings-drafters": partial(settings, _DRAFTERS),
    "settings-training": partial(settings, _TRAINING),
    "http-fields": http_fields,
    "metrics": metrics,
}
"""Functions that print the tables of a page of ``docs/``, by the name of the page."""


if __name__ == "__main__":
    print(PAGES[sys.argv[1]](), end="")
