"""Base class and validators of the settings, and names of domains: ``code``, or ``acme.code`` of the tenant acme."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

_NAME = r"[a-z0-9][a-z0-9_-]{0,63}"

DOMAIN = f"^{_NAME}$"
"""Pattern of a domain name in a request, and of a tenant's name."""

FULL_DOMAIN = rf"^({_NAME}\.)?{_NAME}$"
"""Pattern of a domain name inside the service; it is also the name of a folder and part of Redis keys."""


class ConfigError(ValueError):
    """Unknown setting or invalid value; the message is one line that names the setting."""


def _split_commas(value: Any) -> Any:
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


COMMA_SEPARATED = BeforeValidator(_split_commas)
"""Validator for a tuple of strings, which also accepts one string with commas."""


class Section(BaseModel):
    """Section of the settings tree; it is immutable and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def by_kind(classes: Sequence[type[Any]]) -> dict[str, type[Any]]:
    """Return classes of settings by the default of their field ``kind``."""
    return {section.model_fields["kind"].default: section for section in classes}


@dataclass(frozen=True)
class _KindValidator(BeforeValidator):
    """Validator whose JSON schema requires ``kind`` for every kind except ``default``.

    A value without ``kind`` is of the default kind.
    """

    default: str = ""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        union = handler(schema)
        for kind, reference in union["discriminator"]["mapping"].items():
            if kind != self.default:
                section = handler.resolve_ref_schema({"$ref": reference})
                section["required"] = sorted({"kind", *section.get("required", ())})
        return union


def of_kind(kinds: Mapping[str, type[Any]], default: str) -> BeforeValidator:
    """Return the validator that chooses a class of a union of settings classes by ``kind``.

    Args:
        kinds: the classes by kind.
        default: the kind of a value without ``kind``.

    Returns:
        A validator to annotate the union with. Its errors name a key as users write it, such as ``drafter.heads``,
        without the chosen kind.
    """

    def validate(value: Any) -> Any:
        if isinstance(value, Section):
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("model_type", "Input should be an object")
        kind = value.get("kind", default)
        if not isinstance(kind, str) or kind not in kinds:
            *most, last = map(repr, kinds)
            raise setting_error("kind", kind, f"must be {', '.join(most)} or {last}")
        known = [name for name in kinds[kind].model_fields if name != "kind"]
        for key, content in value.items():
            if key != "kind" and key not in known:
                message = f"is not read by kind {kind}, which has {', '.join(known) or 'no other key'}"
                raise setting_error(str(key), content, message, "not_of_kind")
        return kinds[kind].model_validate(value)

    return _KindValidator(validate, default=default)


def setting_error(key: str, value: object, message: str, kind: LiteralString = "refused") -> ValidationError:
    """Return the error for a validator to raise about one key of its section.

    Args:
        key: the key below the section; it may have dots.
        value: the refused value.
        message: the rule, to follow the name of the key.
        kind: the type of the error in Pydantic.
    """
    error = PydanticCustomError(kind, "{message}", {"message": message})
    details = InitErrorDetails(type=error, loc=tuple(key.split(".")), input=value)
    return ValidationError.from_exception_data("settings", [details])


def check_domain(domain: str) -> str:
    """Return ``domain`` if it is a valid full name.

    Raises:
        ValueError: it is not.
    """
    if not re.fullmatch(FULL_DOMAIN, domain):
        rule = "must be 1 to 64 of a-z, 0-9, _ and -, begin with a letter or digit, and may follow a TENANT. prefix"
        raise ValueError(f"domain {domain!r}: {rule}")
    return domain


def tenant_of(domain: str) -> str:
    """Return the tenant of a domain, or "" when the domain belongs to no tenant."""
    return domain.rpartition(".")[0]


def in_tenant(tenant: str, domain: str) -> str:
    """Return the full name of a tenant's domain; a name that is already full and an empty tenant change nothing."""
    return f"{tenant}.{domain}" if tenant and tenant_of(domain) != tenant else domain
