"""Calls that Schemathesis generates from the OpenAPI document."""

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
"""Largest number of tokens of an answer."""
LONG = 60
"""Largest number of seconds of an answer."""
ADMIN = "^/admin/"
CALLS = 10_000

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


# Tests are generated from the document before the service starts.
document = asking(ScriptedService(Settings())).get("/openapi.json").json()
schema = schemathesis.openapi.from_dict(document)

BODY_PATHS = [path for path, item in document["paths"].items() if "requestBody" in item.get("post", {})]
"""Paths that take a body; the other paths have few different calls."""
EACH = -(-CALLS // sum(not path.startswith("/admin/") for path in BODY_PATHS))
"""Calls of each of these paths, for ``CALLS`` in total."""


@pytest.fixture
def calls() -> Iterator[Callable[[schemathesis.Case, int], None]]:
    """Function that counts the calls of a test; the test fails if a path with a body has fewer than it needs."""
    count, minimum = 0, 0

    def add(case: schemathesis.Case, needed: int) -> None:
        nonlocal count, minimum
        count, minimum = count + 1, needed if case.path in BODY_PATHS else 1

    yield add
    assert count >= max(minimum, 1)


def of(count: int, *more: Phase) -> settings:
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate, *more],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def answered(case, service, **headers: str) -> None:
    """Send a case and check its answer; valid numbers of tokens are lowered, and valid timeouts are raised."""
    body = case.body
    if case.path.startswith("/v1/") and isinstance(body, dict):
        lengths = [name for name in ("max_tokens", "max_completion_tokens") if name in body] or ["max_tokens"]
        for name in lengths:
            value = body.setdefault(name, SHORT)
            body[name] = min(value, SHORT) if type(value) is int else value
        if type(body.get("timeout")) in (int, float) and body["timeout"] > 0:
            body["timeout"] = max(body["timeout"], LONG)  # a shorter timeout would be answered with 504
    case.call_and_validate(base_url=service.url, checks=CHECKS, timeout=LONG, headers=headers)


@schema.parametrize()
@of(10)
def test_calls_of_every_path_match_the_document(case, service):
    answered(case, service)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@schema.exclude(path_regex=ADMIN).parametrize()
@of(EACH, Phase.explicit)
def test_ten_thousand_calls_match_the_document(case, service, calls):
    calls(case, EACH)
    answered(case, service)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@schema.include(path_regex=ADMIN).parametrize()
@of(100, Phase.explicit)
def test_admin_calls_match_the_document(case, service):
    answered(case, service, Authorization=f"Bearer {ADMIN_KEY}")
