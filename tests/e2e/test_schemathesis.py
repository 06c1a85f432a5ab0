"""Schemathesis reads the OpenAPI document and tries what it promises and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
CALLS = 10_000

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


# Tests are made of it before there is a service.
document = asking(ScriptedService(Settings())).get("/openapi.json").json()
schema = schemathesis.openapi.from_dict(document)

TAKING = [path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})]
"""Paths that take a body: there is no end to what may be sent to them, and little to be tried of the others."""
EACH = -(-CALLS // sum(not path.startswith("/admin/") for path in TAKING))
"""Calls of each of these, for ``CALLS`` in all."""


@pytest.fixture
def calls() -> Iterator[Callable[[schemathesis.Case, int], None]]:
    """Is told of each call of a test, and how many these must be in the end where it has a body."""
    made, least = 0, 0

    def made_one(case: schemathesis.Case, wanted: int) -> None:
        nonlocal made, least
        made, least = made + 1, wanted if case.path in TAKING else 1

    yield made_one
    assert made >= max(least, 1)


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
@of(EACH, Phase.explicit)
def test_ten_thousand_calls_keep_to_the_document(case, service, calls):
    calls(case, EACH)
    answered(case, service)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@schema.include(path_regex=ADMIN).parametrize()
@of(100, Phase.explicit)
def test_calls_of_operators_keep_to_the_document(case, service):
    answered(case, service, Authorization=f"Bearer {ADMIN_KEY}")
