"""Random JSON Schemas sent to a whole replica with the default model: answers that end by themselves are valid."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator

from deploy.preparation import ensure_version
from osd.capture.server import RedisServer
from osd.config import Settings
from osd.target.load import target_directory
from serving.api.routes import create_app
from tests.replicas import Replicas

PATTERNS = ["^[a-c]{2,4}$", "^(yes|no|maybe)$", "^[A-Z]{2}-[0-9]{1,3}$", "[0-9]", "^x?y+$", "^\\d{4}-\\d{2}$", "^\\S*$"]
NAMES = ["id", "name", "total price", "größe", 'a "b"', "kind", "items", "note"]
UNSUPPORTED = {
    "not": {"not": {"type": "null"}},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "minContains": {"type": "array", "minContains": 1},
}


class Schemas:
    """Draws schemas; ``broken`` is what the next one has somewhere instead of a leaf."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - no secret

    def schema(self, broken: dict[str, Any] | None = None) -> dict[str, Any]:
        """A schema of at most three levels, which may refer to definitions, one of them to itself."""
        made = self._value(3) if broken is None else self._record([("found", broken)], 1)
        if broken is None and self.chance.random() < 0.2:
            tree = {
                "type": "object",
                "properties": {"value": self._leaf(), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                "required": ["value", "next"],
                "additionalProperties": False,
            }
            inner = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}
            use = self.chance.choice(
                [{"$ref": "#/$defs/tree"}, inner, self._record([("a", {"$ref": "#/$defs/leaf"})], 1)]
            )
            made = {**use, "$defs": {"tree": tree, "leaf": self._value(1)}}
        return made

    def _value(self, depth: int) -> dict[str, Any]:
        kind = self.chance.choice(["leaf", "array", "object", "object", "any"]) if depth else "leaf"
        if kind == "array":
            least = self.chance.randrange(3)
            sizes = {"minItems": least} if self.chance.random() < 0.7 else {}
            sizes |= {"maxItems": least + self.chance.randrange(3)} if self.chance.random() < 0.8 else {}
            return {"type": "array", "items": self._value(depth - 1), **sizes}
        if kind == "object":
            return self._record([], depth)
        if kind == "any":
            return {"anyOf": [self._value(depth - 1) for _ in range(self.chance.randrange(1, 4))]}
        return self._leaf()

    def _record(self, given: list[tuple[str, dict[str, Any]]], depth: int) -> dict[str, Any]:
        names = self.chance.sample(NAMES, self.chance.randrange(1, 4))
        properties = dict(given) | {name: self._value(depth - 1) for name in names}
        required = [name for name in properties if self.chance.random() < 0.7]
        more = self.chance.choice([False, False, False, {"type": "integer", "minimum": 0, "maximum": 9}])
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}

    def _leaf(self) -> dict[str, Any]:
        chance = self.chance
        low, long = chance.randrange(-200, 200), chance.randrange(4)
        below, above = chance.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        return chance.choice(
            [
                {"type": "string", "maxLength": long + chance.randrange(12)},
                {"type": "string", "minLength": long, "maxLength": long + chance.randrange(12)},
                {"type": "string", "minLength": long},
                {"type": "string", "pattern": chance.choice(PATTERNS)},
                {"type": "string", "format": chance.choice(["date", "time", "uuid", "ipv4", "email"])},
                {"type": "integer", below: low, above: low + 2 + chance.randrange(400)},
                {"type": "integer", "multipleOf": chance.randrange(2, 9), "minimum": 0, "maximum": 99},
                {"type": "integer"},
                {"type": "number", below: low / 4, above: low / 4 + 1 + chance.randrange(100)},
                {"type": "number"},
                {"type": "boolean"},
                {"type": "null"},
                {"type": ["boolean", "null"]},
                {"enum": chance.sample(["red", "green", 3, 2.5, None, True, 'grün "x"', [1], {"a": 1}], 3)},
                {"const": chance.choice([1, "one", [1, {"a": None}], {"x": "y"}, False])},
            ]
        )


def check(schema: dict[str, Any], broken: str | None, status: int, answer: dict[str, Any]) -> str:
    """How one request ended, after a look at what it was promised."""
    assert status in (200, 400), (schema, answer)
    if status == 400:
        error = answer["error"]
        assert error["param"] == "response_format.json_schema.schema", (schema, error)
        assert error["message"], schema
        assert broken is None or broken in error["message"], (schema, error)
        return "unsupported" if broken else "refused"
    assert broken is None, schema
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "stop":
        value = json.loads(choice["message"]["content"])
        errors = [error.message for error in Draft202012Validator(schema).iter_errors(value)]
        assert not errors, (schema, choice["message"]["content"], errors)
    return choice["finish_reason"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_answers_to_a_thousand_random_schemas_are_valid_or_the_schema_is_refused(tmp_path):
    target = target_directory(Settings())
    settings = Settings(home=tmp_path, target={"source": str(target)}, capture={"enabled": False})
    with RedisServer(max_memory_mb=64) as redis:
        ensure_version(settings, redis.url, target)
        replicas = Replicas(settings, redis.url)
        try:
            found = asyncio.run(ask(create_app(replicas.start("one")), count=1000, together=settings.engine.slots))
        finally:
            replicas.end_all()
    print(dict(found))
    assert sum(found.values()) == 1000
    assert found["unsupported"] >= 80
    assert found["refused"] <= 20
    assert found["stop"] >= 500


async def ask(app: Any, count: int, together: int) -> Counter[str]:
    """Send ``count`` requests, so many at a time; returns how they ended."""
    schemas, found, free = Schemas(7), Counter(), asyncio.Semaphore(together)

    async def one(number: int, schema: dict[str, Any], broken: str | None) -> None:
        asked = f"Answer with JSON that keeps to this JSON Schema, as short as it can be: {json.dumps(schema)}"
        body = {
            "messages": [{"role": "user", "content": asked}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}},
            "max_tokens": 60 + number % 61,
            "temperature": number % 2,
            "seed": number,
        }
        async with free:
            response = await http.post("/v1/chat/completions", json=body)
        found[check(schema, broken, response.status_code, response.json())] += 1

    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600) as http:
        asked = []
        for number in range(count):
            broken = schemas.chance.choice(list(UNSUPPORTED)) if schemas.chance.random() < 0.1 else None
            asked.append(one(number, schemas.schema(broken and UNSUPPORTED[broken]), broken))
        failed = [error for error in await asyncio.gather(*asked, return_exceptions=True) if error is not None]
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} of {count}", failed)
    return found
