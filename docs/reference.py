"""Tables of the documentation as Markdown: ``python -m docs.reference settings``, or ``metrics``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from osd.config.base import Section
from osd.config.settings import Settings
from serving.metrics.table import TABLE

_LIMITS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def settings() -> str:
    """Return a table for each section of the settings, and for each kind of a setting that has kinds."""
    return "\n".join(_section("", Settings, set()))


def metrics() -> str:
    """Return the table of all metrics, sorted by name."""
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for row in sorted(TABLE, key=lambda row: row.name):
        name = f"{row.name}_total" if row.kind == "counter" else row.name
        lines.append(f"| `{name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.help} |")
    return "\n".join(lines) + "\n"


def _section(name: str, section: type[Section], printed: set[type[Section]]) -> Iterator[str]:
    """Yield lines for the settings of ``section`` below ``name``, then for its sections that are not in ``printed``."""
    printed.add(section)
    rows: list[str] = []
    inner: list[tuple[str, type[Section]]] = []
    # A section with several kinds is a union of classes, whose field ``kind`` has one value.
    kind = section.model_fields.get("kind")
    is_kind = kind is not None and len(list(_choices(kind.annotation))) == 1
    for key, field in section.model_fields.items():
        path = f"{name}.{key}" if name else key
        sections = list(_sections(field.annotation))
        kinds = [str(part.model_fields["kind"].default) for part in sections] if len(sections) > 1 else []
        inner += [(path, part) for part in sections]
        if kinds:
            default = field.get_default(call_default_factory=True).kind
            rows.append(f"| `{path}.kind` | `{default}` | one of {', '.join(f'`{kind}`' for kind in kinds)} |")
        elif not sections and not (key == "kind" and is_kind):
            rows.append(f"| `{path}` | {_default(field)} | {_meaning(field)} |")
    title = f"{name}.kind={kind.default}" if kind is not None and is_kind else name
    if rows:
        purpose = " ".join((section.__doc__ or "").split("\n\n")[0].split())
        yield from (f"### `{title}`", "") if title else ()
        yield from (purpose, "", "| setting | default | |", "|---|---|---|", *rows, "")
    for path, part in inner:
        if part not in printed:
            yield from _section(path, part, printed)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from _sections(part)


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


if __name__ == "__main__":
    print({"settings": settings, "metrics": metrics}[sys.argv[1]](), end="")
