"""Schemathesis reads the OpenAPI document and tries what it promises and what it does not."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from osd.config import Settings
from tests.e2e.conftest import ADMIN_KEY
from tests.unit.serving.answers import asking
from tests.unit.serving.scripted import ScriptedService

SHORT = 4
"""Tokens of an answer."""
LONG = 60
"""Seconds that an answer may take."""
ADMIN = "^/admin/"

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


# Tests are made of it before there is a service.
schema = schemathesis.openapi.from_dict(asking(ScriptedService(Settings())).get("/openapi.json").json())


def of(count: int, *more: Phase) -> settings:
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, *more],
        suppress_health_check=list(HealthCheck),
    )


def answered(case, service, **headers: str) -> None:
    """Send a case whose answer is short, and may take long, where nothing is wrong with either; see what comes back."""
    body = case.body
    if case.path.startswith("/v1/") and isinstance(body, dict):
        lengths = [name for name in ("max_tokens", "max_completion_tokens") if name in body] or ["max_tokens"]
        for name in lengths:
            asked = body.setdefault(name, SHORT)
            body[name] = min(asked, SHORT) if type(asked) is int else asked
        if type(body.get("timeout")) in (int, float) and body["timeout"] > 0:
            body["timeout"] = max(body["timeout"], LONG)  # 504 is the right answer to what can only be late
    case.call_and_validate(base_url=service.url, checks=CHECKS, timeout=LONG, headers=headers)


@schema.parametrize()
@of(10)
def test_a_few_calls_of_every_path_keep_to_the_document(case, service):
    answered(case, service)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@schema.exclude(path_regex=ADMIN).parametrize()
@of(900, Phase.explicit)  # of some ten operations, and of each a thousand cases of its own at the limits of fields
def test_ten_thousand_calls_keep_to_the_document(case, service):
    answered(case, service)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@schema.include(path_regex=ADMIN).parametrize()
@of(100, Phase.explicit)
def test_calls_of_operators_keep_to_the_document(case, service):
    answered(case, service, Authorization=f"Bearer {ADMIN_KEY}")
