"""The description of the API: OpenAPI 3.1 of the routes and the types that they name, and one page without a script."""

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
    """What a route does, in a line; types of its JSON ``body``, of its ``answer`` and of each event of a stream.

    No answer's type means text.
    """

    summary: str
    answer: Any = None
    body: Any = None
    event: Any = None


def described(summary: str, answer: Any = None, body: Any = None, event: Any = None) -> dict[str, Any]:
    """An ``Operation`` as arguments of ``add_api_route``."""
    return {"openapi_extra": {_KEY: Operation(summary, answer, body, event)}}


_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_JSON = "application/json"

Schemas = dict[Any, dict[str, Any]]


def document(routes: Iterable[BaseRoute], open_paths: frozenset[str]) -> dict[str, Any]:
    """Describe those ``routes`` that say what they do; ``open_paths`` need no key."""
    ours = (route for route in routes if isinstance(route, APIRoute))
    described = [(route, found) for route in ours if (found := (route.openapi_extra or {}).get(_KEY))]
    schemas, components = _schemas(found for _, found in described)
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted(route.methods or ()):
            said = _operation(operation, schemas) | {"operationId": route.name}
            if names := _PARAMETER.findall(route.path):
                said["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
                ]
            if path not in open_paths:
                said["security"] = [{"key": []}] + ([{}] if right_for(path) != "administer" else [])
            paths.setdefault(path, {})[method.lower()] = said
    key = {"type": "http", "scheme": "bearer", "description": "Where the server has keys."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "osd", "version": osd.__version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": key}},
    }


def _schemas(operations: Iterable[Operation]) -> tuple[Schemas, dict[str, Any]]:
    """References to the types that ``operations`` name, and what they refer to."""
    modes = {Error: "serialization"}
    for one in operations:
        modes |= {kind: "serialization" for kind in (one.answer, one.event) if kind is not None}
        modes |= {one.body: "validation"} if one.body is not None else {}
    inputs: list[Any] = [(kind, mode, TypeAdapter(kind)) for kind, mode in modes.items()]
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    return {kind: dict(schema) for (kind, _), schema in found.items()}, definitions["$defs"]


def _operation(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {_JSON: {"schema": schemas[operation.answer]}}
    if operation.event is not None:
        name = schemas[operation.event]["$ref"].rpartition("/")[2]
        events = f"With stream: server-sent events, the data of each a {name}, and [DONE] in the end."
        # Without a type: some take the schema for the whole text of the stream, others for each event that they read.
        content["text/event-stream"] = {"schema": {"description": events}}
    problem = {"description": "Refused, or failed.", "content": {_JSON: {"schema": schemas[Error]}}}
    said: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "Done.", "content": content}, "default": problem},
    }
    if operation.body is not None:
        said["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[operation.body]}}}
    return said


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
            parts += _section(path, method, said)
    parts.append("<h2>Types</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts += _type(name, schema)
    return "\n".join([*parts, "</main></body></html>\n"])


def _section(path: str, method: str, said: dict[str, Any]) -> Iterator[str]:
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
