"""Base class of request bodies: unknown fields are errors, unsupported fields accept neutral values."""

from __future__ import annotations

from typing import Any, ClassVar, LiteralString

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from osd.config import ServingSettings

VLLM: JsonDict = {"x-api": "vLLM"}
"""Mark of a field of vLLM's API in the JSON schema. Unmarked fields are OpenAI's, or as the field that they are in."""


def unsupported(param: str, message: LiteralString = "'{param}' is not supported.") -> PydanticCustomError:
    """Return the validation error for an unsupported field."""
    return PydanticCustomError("unsupported", message, {"param": param})


def _equal(value: Any, neutral: Any) -> bool:
    # Python's 0 equals False; JSON's does not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class Body(BaseModel):
    """JSON object with known fields only.

    ``neutral`` maps unsupported fields to the values that do not change the result; these values are accepted. The
    context of validation is ``ServingSettings``, which holds the limits of counts. Lists stop at the first error, and
    ``at_most`` limits objects, so that a long invalid value costs little.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema, with the neutral fields added."""
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema).setdefault("properties", {})
        text = "not supported; accepted with a value that changes nothing"
        fields.update({name: {"enum": list(values), "description": text} for name, values in cls.neutral.items()})
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, values in cls.neutral.items():
            if name in data and not any(_equal(data[name], value) for value in values):
                raise unsupported(name)
        present = {name: value for name, value in data.items() if name not in cls.neutral}
        fields = [field.alias or name for name, field in cls.model_fields.items()]
        for name in present:
            if name not in fields:
                message = "'{field}' is not supported."
                raise PydanticCustomError("unknown_field", message, {"field": name, "known": fields})
        return present


def at_most(limit: int) -> BeforeValidator:
    """Return a validator that refuses a list or an object of more than ``limit`` entries before it looks at them."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries and the limit is {limit}")
        return value

    return BeforeValidator(check)


def limits_of(info: ValidationInfo) -> ServingSettings:
    """Return the limits of counts from the context of a validation."""
    return info.context or ServingSettings()


def too_many(param: str, count: int, limit: int) -> PydanticCustomError:
    """Return the validation error for a list that is longer than the server's limit."""
    message = "'{param}' has {count} entries and this server's limit is {limit}."
    return PydanticCustomError("too_many", message, {"param": param, "count": count, "limit": limit})
