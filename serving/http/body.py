"""What every request body has in common: known fields only, and neutral values of those that are not supported."""

from __future__ import annotations

from typing import Any, ClassVar, LiteralString

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from osd.config import ServingSettings


def unsupported(param: str, message: LiteralString = "'{param}' is not supported.") -> PydanticCustomError:
    """The refusal of a field that is not supported, at all or where it stands."""
    return PydanticCustomError("unsupported", message, {"param": param})


def _equal(value: Any, neutral: Any) -> bool:
    # In JSON 0 and false differ; in Python they do not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class Body(BaseModel):
    """A JSON object with known fields only. Fields in ``neutral`` may say what is done anyway.

    The server's limits of counts are the context of validation, ``ServingSettings``. What is too many, or one of many
    that is wrong, is refused before the rest is looked at.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Tell of neutral fields too."""
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema).setdefault("properties", {})
        fields.update({name: {"enum": list(values)} for name, values in cls.neutral.items()})
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, values in cls.neutral.items():
            if name in data and not any(_equal(data[name], value) for value in values):
                raise unsupported(name)
        given = {name: value for name, value in data.items() if name not in cls.neutral}
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        # The first unknown name is what the refusal tells: a thousand more would only take time.
        unknown = next((name for name in given if name not in fields), None)
        return {name: value for name, value in given.items() if name in fields or name == unknown}


def limits_of(info: ValidationInfo) -> ServingSettings:
    """The server's limits of counts, in a validation."""
    return info.context or ServingSettings()


def too_many(param: str, count: int, limit: int) -> PydanticCustomError:
    """The refusal of a list that is longer than this server allows."""
    message = "'{param}' has {count} entries and this server's limit is {limit}."
    return PydanticCustomError("too_many", message, {"param": param, "count": count, "limit": limit})
