"""Arbitrary requests get a response, and every error has OpenAI's format."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.generated import HEADERS, PATHS, bodies
from tests.unit.serving.answers import asking


@pytest.fixture
def serving():
    return {}


@pytest.fixture
def client(make_service, serving):
    """Client of one application for all examples."""
    return asking(make_service(**serving))


@pytest.mark.parametrize("serving", [{}, {"api_key": "right", "request_timeout_s": 60.0}])
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_gets_an_answer_or_an_openai_error(client, path, data):
    body = data.draw(bodies(path))
    headers = {b"content-type": b"application/json", b"authorization": b"Bearer right", **data.draw(HEADERS)}
    check(client.request("POST", path, content=body, headers=list(headers.items())))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(["/v1/models", "/v1/models/x", "/dashboard/data", "/health", "/metrics", "/dashboard/y"]),
    query=st.text(st.characters(max_codepoint=255), max_size=30) | st.integers(0, 10**9).map(lambda n: f"{n}" * 600),
    headers=HEADERS,
    method=st.sampled_from(["GET", "HEAD", "OPTIONS", "DELETE", "POST"]),
)
def test_any_request_line_gets_an_answer_or_an_openai_error(client, path, query, headers, method):
    url = httpx.URL(f"http://127.0.0.1{path}", params={"seconds": query})
    check(client.request(method, url, headers=list(headers.items()), follow_redirects=False))


def check(response):
    late = response.status_code == 504 and b'"timeout"' in response.request.content  # the request set a short timeout
    assert response.status_code < 500 or late
    if response.status_code >= 400 and response.request.method != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
