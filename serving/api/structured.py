"""What a request says about the form of its answer: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from serving.http.body import Body

MOST_TEXT = 65_536
"""Characters of a schema, a regular expression, a grammar, or all choices together at most."""
MOST_CHOICES = 1024
"""Entries of ``choice`` at most."""


class Structure(NamedTuple):
    """What an answer has to look like: the ``text`` of a kind of ``osd.engine.grammar_check.GRAMMARS``.

    ``param`` is the field that says so.
    """

    param: str
    kind: str
    text: str


def bounded(size: int) -> None:
    """Refuse a text of so many characters that is too long."""
    if size > MOST_TEXT:
        raise ValueError(f"has {size} characters and the limit is {MOST_TEXT}")


def _text(value: str) -> str:
    bounded(len(value))
    return value


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    bounded(len(json.dumps(value, allow_nan=False)))
    return value


def _read(value: Any) -> Any:
    """A schema that is sent as its text, read."""
    if not isinstance(value, str):
        return value
    bounded(len(value))
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("is a text that is not JSON") from None


def _choices(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) > MOST_CHOICES:
            raise ValueError(f"has {len(value)} entries and the limit is {MOST_CHOICES}")
        bounded(sum(len(one) for one in value if isinstance(one, str)))
    return value


JsonSchemaText = Annotated[dict[str, Any], AfterValidator(_schema)]
"""A JSON Schema, as large as it may be."""


class JsonSchema(Body):
    """A JSON Schema. ``name`` and ``description`` are labels; the answer keeps to the schema, ``strict`` or not."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: JsonSchemaText = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or what a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("needs 'json_schema' where the type is json_schema, and nowhere else")
        return self

    @property
    def structure(self) -> Structure | None:
        """What it asks for, None for any text."""
        if self.json_schema is not None:
            return Structure("response_format.json_schema.schema", "json", json.dumps(self.json_schema.schema_))
        return Structure("response_format", "json", '{"type": "object"}') if self.type == "json_object" else None


class StructuredOutputs(Body):
    """A JSON Schema, as an object or its text, a regular expression, some texts, or a grammar in Lark's syntax or GBNF.

    The whole answer keeps to it.
    """

    json_: Annotated[
        JsonSchemaText | None, BeforeValidator(_read, json_schema_input_type=dict[str, Any] | str | None)
    ] = Field(None, alias="json")
    regex: Annotated[str, Field(min_length=1), AfterValidator(_text)] | None = None
    choice: Annotated[list[str] | None, Field(min_length=1), BeforeValidator(_choices)] = None
    grammar: Annotated[str, Field(min_length=1), AfterValidator(_text)] | None = None

    @property
    def _given(self) -> dict[str, str]:
        choice = None if self.choice is None else json.dumps(self.choice)
        schema = None if self.json_ is None else json.dumps(self.json_)
        texts = {"json": schema, "regex": self.regex, "choice": choice, "grammar": self.grammar}
        return {kind: text for kind, text in texts.items() if text is not None}

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self._given) != 1:
            raise ValueError(f"needs one of json, regex, choice and grammar, and has {len(self._given)}")
        return self

    @property
    def structure(self) -> Structure:
        """What it asks for."""
        ((kind, text),) = self._given.items()
        return Structure(f"structured_outputs.{kind}", kind, text)
