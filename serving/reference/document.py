"""The description of the API for programs: OpenAPI 3.1, made of the routes and of the types that they name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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
