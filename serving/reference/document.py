"""OpenAPI 3.1 document of the routes and their types, and its HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import BaseRoute

import osd
from serving.access.guard import right_for
from serving.reference.shapes import Error

_KEY = "osd"


@dataclass(frozen=True)
class Operation:
    """Description of a route.

    Attributes:
        summary: one sentence.
        answer: type of the JSON response; None for a text response.
        body: type of the JSON body; None without a body.
        event: type of the events of a streamed response; None without streaming.
    """

    summary: str
    answer: Any = None
    body: Any = None
    event: Any = None


def described(summary: str, answer: Any = None, body: Any = None, event: Any = None) -> dict[str, Any]:
    """Return an ``Operation`` as keyword arguments of ``add_api_route``."""
    return {"openapi_extra": {_KEY: Operation(summary, answer, body, event)}}


_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_JSON = "application/json"

Schemas = dict[Any, dict[str, Any]]


def document(routes: Iterable[BaseRoute], open_paths: frozenset[str]) -> dict[str, Any]:
    """Return the OpenAPI document of all ``routes`` with an ``Operation``; ``open_paths`` need no key."""
    described = [
        (route, operation)
        for route in routes
        if isinstance(route, APIRoute) and (operation := (route.openapi_extra or {}).get(_KEY))
    ]
    schemas, components = _schemas(operation for _, operation in described)
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted(route.methods or ()):
            description = _operation(operation, schemas) | {"operationId": route.name}
            if names := _PARAMETER.findall(route.path):
                description["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
                ]
            if path not in open_paths:
                description["security"] = [{"key": []}] + ([{}] if right_for(path) != "administer" else [])
            paths.setdefault(path, {})[method.lower()] = description
    key = {"type": "http", "scheme": "bearer", "description": "Required if the server has keys."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "osd", "version": osd.__version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": key}},
    }


def _schemas(operations: Iterable[Operation]) -> tuple[Schemas, dict[str, Any]]:
    """Return references to the schemas of all types of ``operations``, and the schemas by name."""
    modes = {Error: "serialization"}
    for operation in operations:
        modes |= {kind: "serialization" for kind in (operation.answer, operation.event) if kind is not None}
        modes |= {operation.body: "validation"} if operation.body is not None else {}
    inputs: list[Any] = [(kind, mode, TypeAdapter(kind)) for kind, mode in modes.items()]
    references, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    return {kind: dict(schema) for (kind, _), schema in references.items()}, definitions["$defs"]


def _operation(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {_JSON: {"schema": schemas[operation.answer]}}
    if operation.event is not None:
        name = schemas[operation.event]["$ref"].rpartition("/")[2]
        events = f"With stream: server-sent events. The data of each event is a {name}; the last event is [DONE]."
        # No type: some tools apply the schema to the whole stream, others to each event.
        content["text/event-stream"] = {"schema": {"description": events}}
    problem = {"description": "Error.", "content": {_JSON: {"schema": schemas[Error]}}}
    description: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "Success.", "content": content}, "default": problem},
    }
    if operation.body is not None:
        description["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[operation.body]}}}
    return description


_LIMITS = {
    "minimum": "≥ {}", "maximum": "≤ {}", "exclusiveMinimum": "> {}", "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters", "minItems": "at least {}", "maxItems": "at most {}", "pattern": "like {}",
}  # fmt: skip


def page(document: dict[str, Any]) -> str:
    """Render an OpenAPI document as HTML."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{escape(title)}</title><link rel="stylesheet" href="docs/style.css"></head><body>',
        f'<header><h1>{escape(title)}</h1><p><a href="openapi.json">openapi.json</a></p></header><main>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _section(path, method, operation)
    parts.append("<h2>Types</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts += _type(name, schema)
    return "\n".join([*parts, "</main></body></html>\n"])


def _section(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p><dl>"
    if body := operation.get("requestBody"):
        yield f"<dt>Body</dt><dd>{_render_type(body['content']['application/json']['schema'])}</dd>"
    for media, content in operation["responses"]["200"]["content"].items():
        text = escape(content["schema"].get("description", "")) or _render_type(content["schema"])
        yield f"<dt>Response, <code>{media}</code></dt><dd>{text}</dd>"
    if {"key": []} in operation.get("security", []):
        needed = (
            "required if the server has keys"
            if {} in operation["security"]
            else "required, with the right to administer"
        )
        yield f"<dt>Key</dt><dd>{needed}</dd>"
    yield "</dl></section>"


def _type(name: str, schema: dict[str, Any]) -> Iterator[str]:
    description = escape(" ".join(schema.get("description", "").split()))
    yield f'<section id="{escape(name)}"><h3>{escape(name)}</h3><p>{description}</p>'
    if fields := schema.get("properties"):
        required = schema.get("required", ())
        yield "<table><thead><tr><th>Field</th><th>Value</th><th></th></tr></thead><tbody>"
        for field, value in fields.items():
            mark = "required" if field in required else ""
            text = " ".join(filter(None, (_render_type(value), escape(value.get("description", "")))))
            yield f"<tr><td><code>{escape(field)}</code></td><td>{text}</td><td>{mark}</td></tr>"
        yield "</tbody></table>"
    else:
        yield f"<p>{_render_type(schema)}</p>"
    yield "</section>"


def _render_type(schema: dict[str, Any]) -> str:
    """Render the type of a value, with its limits, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_render_type, alternatives)))
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        kind = f"list of {_render_type(schema['items'])}" if "items" in schema else "list"
    elif isinstance(values := schema.get("additionalProperties"), dict):
        kind = f"object of {_render_type(values)}"
    limits = [text.format(escape(str(schema[name]))) for name, text in _LIMITS.items() if name in schema]
    return ", ".join([kind, *limits])
