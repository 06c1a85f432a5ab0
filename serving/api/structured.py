"""Constraints on the answer: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from osd.nesting import MAX_DEPTH, check_nesting
from serving.http.body import Body

MOST_TEXT = 65_536
"""Limit on the characters of a schema, a regular expression, a grammar, or all choices together."""
MOST_CHOICES = 1024
"""Limit on the entries of ``choice``."""

_SIZE = f"at most {MOST_TEXT} characters"


class OutputConstraint(NamedTuple):
    """Constraint on an answer.

    Attributes:
        param: field of the request that sets the constraint.
        kind: kind of grammar, a key of ``osd.engine.grammar_check.GRAMMARS``.
        text: text of the grammar.
    """

    param: str
    kind: str
    text: str


def check_size(size: int) -> None:
    """Check the number of characters of a text.

    Raises:
        ValueError: the text is too long.
    """
    if size > MOST_TEXT:
        raise ValueError(f"has {size} characters and the limit is {MOST_TEXT}")


def _text(value: str) -> str:
    check_size(len(value))
    return value


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    check_size(len(json.dumps(value, allow_nan=False)))
    return value


def _read(value: Any) -> Any:
    """Parse a schema that is sent as text."""
    if not isinstance(value, str):
        return value
    check_size(len(value))
    check_nesting(value)
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("is a text that is not JSON") from None


def _choices(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) > MOST_CHOICES:
            raise ValueError(f"has {len(value)} entries and the limit is {MOST_CHOICES}")
        check_size(sum(len(choice) for choice in value if isinstance(choice, str)))
    return value


JsonSchemaText = Annotated[dict[str, Any], AfterValidator(_schema)]
"""JSON Schema of limited size."""


class JsonSchema(Body):
    """JSON Schema of the answer."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$", description="label, 1 to 64 of A-Z, a-z, 0-9, _ and -")
    description: str | None = Field(None, description="label")
    schema_: JsonSchemaText = Field(alias="schema", description=f"JSON Schema; {_SIZE}")
    strict: bool | None = Field(None, description="no effect: the answer always follows the schema")


class ResponseFormat(Body):
    """Format of the answer: free text, any JSON object, or an instance of a JSON Schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="any text, any JSON object, or a value that follows json_schema"
    )
    json_schema: JsonSchema | None = Field(
        None, description="required with the type json_schema, and only allowed there"
    )

    @model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("needs 'json_schema' if the type is json_schema, and must not have it otherwise")
        return self

    @property
    def structure(self) -> OutputConstraint | None:
        """Constraint on the answer; None for any text."""
        if self.json_schema is not None:
            return OutputConstraint("response_format.json_schema.schema", "json", json.dumps(self.json_schema.schema_))
        return OutputConstraint("response_format", "json", '{"type": "object"}') if self.type == "json_object" else None


class StructuredOutputs(Body):
    """Constraint on the whole answer; exactly one field must be set."""

    json_: Annotated[
        JsonSchemaText | None, BeforeValidator(_read, json_schema_input_type=dict[str, Any] | str | None)
    ] = Field(
        None,
        alias="json",
        description=f"JSON Schema, as an object or as text nested at most {MAX_DEPTH} levels deep; {_SIZE}",
    )
    regex: Annotated[str, Field(min_length=1), AfterValidator(_text)] | None = Field(
        None, description=f"regular expression; {_SIZE}"
    )
    choice: Annotated[list[str] | None, Field(min_length=1), BeforeValidator(_choices)] = Field(
        None, description=f"allowed answers, 1 to {MOST_CHOICES}; {_SIZE}"
    )
    grammar: Annotated[str, Field(min_length=1), AfterValidator(_text)] | None = Field(
        None, description=f"grammar in the syntax of Lark or GBNF; {_SIZE}"
    )

    @property
    def _set_fields(self) -> dict[str, str]:
        choice = None if self.choice is None else json.dumps(self.choice)
        schema = None if self.json_ is None else json.dumps(self.json_)
        texts = {"json": schema, "regex": self.regex, "choice": choice, "grammar": self.grammar}
        return {kind: text for kind, text in texts.items() if text is not None}

    @model_validator(mode="after")
    def _has_one_field(self) -> StructuredOutputs:
        if len(self._set_fields) != 1:
            raise ValueError(f"needs exactly one of json, regex, choice and grammar, and has {len(self._set_fields)}")
        return self

    @property
    def structure(self) -> OutputConstraint:
        """Constraint on the answer, from the field that is set; it is not compiled yet."""
        ((kind, text),) = self._set_fields.items()
        return OutputConstraint(f"structured_outputs.{kind}", kind, text)
