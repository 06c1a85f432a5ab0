"""What every module of settings is made of, and names of domains: ``code``, and ``acme.code`` of the tenant acme."""

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
"""What a request may call a domain, and what a tenant is called."""

FULL_DOMAIN = rf"^({_NAME}\.)?{_NAME}$"
"""A domain as the service knows it: it becomes the name of a folder and of a Redis key."""


class ConfigError(ValueError):
    """A setting is unknown or out of range; the message is one line that names it."""


def _listed(given: Any) -> Any:
    return [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given


LISTED = BeforeValidator(_listed)
"""Annotate a tuple of texts: it may be given as a list, or as one text with commas between them."""


class Section(BaseModel):
    """A branch of the settings tree: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def by_kind(classes: Sequence[type[Any]]) -> dict[str, type[Any]]:
    """Classes of settings by the value of their field ``kind``."""
    return {one.model_fields["kind"].default: one for one in classes}


@dataclass(frozen=True)
class _OfKind(BeforeValidator):
    """Its JSON schema asks for a ``kind`` wherever that is not the ``default``: without one a value is of that kind."""

    default: str = ""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        said = handler(schema)
        for kind, reference in said["discriminator"]["mapping"].items():
            if kind != self.default:
                of_it = handler.resolve_ref_schema({"$ref": reference})
                of_it["required"] = sorted({"kind", *of_it.get("required", ())})
        return said


def of_kind(kinds: Mapping[str, type[Any]], default: str) -> BeforeValidator:
    """Annotate a union of ``kinds``: values without a ``kind`` mean ``default``, and errors name the key alone."""

    def chosen(given: Any) -> Any:
        if isinstance(given, Section):
            return given
        if not isinstance(given, dict):
            raise PydanticCustomError("model_type", "Input should be an object")
        kind = given.get("kind", default)
        if not isinstance(kind, str) or kind not in kinds:
            *most, last = map(repr, kinds)
            raise refused("kind", kind, f"must be {', '.join(most)} or {last}")
        keys = [name for name in kinds[kind].model_fields if name != "kind"]
        for name, value in given.items():
            if name != "kind" and name not in keys:
                has = ", ".join(keys) or "no other key"
                raise refused(str(name), value, f"is not read by kind {kind}, which has {has}", "not_of_kind")
        return kinds[kind].model_validate(given)

    return _OfKind(chosen, default=default)


def refused(key: str, value: object, message: str, kind: LiteralString = "refused") -> ValidationError:
    """Return the error that a validator of a section raises about one of its keys, which may have dots."""
    error = PydanticCustomError(kind, "{message}", {"message": message})
    details = InitErrorDetails(type=error, loc=tuple(key.split(".")), input=value)
    return ValidationError.from_exception_data("settings", [details])


def check_domain(domain: str) -> str:
    """Return ``domain`` if it is the full name of one.

    Raises:
        ValueError: it is not.
    """
    if not re.fullmatch(FULL_DOMAIN, domain):
        rule = "must be 1 to 64 of a-z, 0-9, _ and -, and start with a letter or digit; TENANT. may stand before it"
        raise ValueError(f"domain {domain!r}: {rule}")
    return domain


def tenant_of(domain: str) -> str:
    """The tenant whose domain it is, "" for nobody's."""
    return domain.rpartition(".")[0]


def in_tenant(tenant: str, domain: str) -> str:
    """The full name of what ``tenant`` calls ``domain``; "" is no tenant, and full names of the tenant stay."""
    return f"{tenant}.{domain}" if tenant and tenant_of(domain) != tenant else domain
