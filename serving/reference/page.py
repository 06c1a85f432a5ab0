"""The description of the API for people: one page without a script, made of the document."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

_LIMITS = {
    "minimum": "≥ {}", "maximum": "≤ {}", "exclusiveMinimum": "> {}", "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters", "minItems": "at least {}", "maxItems": "at most {}", "pattern": "like {}",
}  # fmt: skip


def page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{escape(title)}</title><link rel="stylesheet" href="docs/style.css"></head><body>',
        f'<header><h1>{escape(title)}</h1><p><a href="openapi.json">openapi.json</a></p></header><main>',
    ]
    for path, operations in document["paths"].items():
        for method, said in operations.items():
            parts += _operation(path, method, said)
    parts.append("<h2>Types</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts += _type(name, schema)
    return "\n".join([*parts, "</main></body></html>\n"])


def _operation(path: str, method: str, said: dict[str, Any]) -> Iterator[str]:
    yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(said['summary'])}</p><dl>"
    if body := said.get("requestBody"):
        yield f"<dt>Body</dt><dd>{_kind(body['content']['application/json']['schema'])}</dd>"
    for media, one in said["responses"]["200"]["content"].items():
        told = escape(one["schema"].get("description", "")) or _kind(one["schema"])
        yield f"<dt>Answer, <code>{media}</code></dt><dd>{told}</dd>"
    if {"key": []} in said.get("security", []):
        whose = "where the server has keys" if {} in said["security"] else "of an administrator"
        yield f"<dt>Key</dt><dd>{whose}</dd>"
    yield "</dl></section>"


def _type(name: str, schema: dict[str, Any]) -> Iterator[str]:
    about = escape(" ".join(schema.get("description", "").split()))
    yield f'<section id="{escape(name)}"><h3>{escape(name)}</h3><p>{about}</p>'
    if fields := schema.get("properties"):
        required = schema.get("required", ())
        yield "<table><thead><tr><th>Field</th><th>Value</th><th></th></tr></thead><tbody>"
        for field, one in fields.items():
            always = "required" if field in required else ""
            told = " ".join(filter(None, (_kind(one), escape(one.get("description", "")))))
            yield f"<tr><td><code>{escape(field)}</code></td><td>{told}</td><td>{always}</td></tr>"
        yield "</tbody></table>"
    else:
        yield f"<p>{_kind(schema)}</p>"
    yield "</section>"


def _kind(schema: dict[str, Any]) -> str:
    """What a value may be, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if one_of := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_kind, one_of)))
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        kind = f"list of {_kind(schema['items'])}" if "items" in schema else "list"
    elif isinstance(values := schema.get("additionalProperties"), dict):
        kind = f"object of {_kind(values)}"
    limits = [text.format(escape(str(schema[name]))) for name, text in _LIMITS.items() if name in schema]
    return ", ".join([kind, *limits])
