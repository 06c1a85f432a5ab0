"""Whatever a client sends, it is answered, and every refusal has OpenAI's shape."""

from __future__ import annotations

import json

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.unit.serving.answers import asking

PATHS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.integers(-3, 3)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
LIKELY = {
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": JSON}),
        max_size=3,
    ),
    "prompt": st.text(max_size=80) | st.lists(st.integers(0, 700) | st.text(max_size=5), max_size=5),
    "tokens": st.lists(st.integers(-1, 700), max_size=9),
    "osd": st.fixed_dictionaries(
        {"growth": st.fixed_dictionaries({"kind": st.sampled_from(["chain", "static_tree"]), "depth": JSON})}
    ),
    "timeout": st.floats(1e300, 1e308) | st.integers(1, 99),
    "logit_bias": st.dictionaries(st.integers(-1, 700).map(str), st.floats(-101, 101), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 700), max_size=66),
    "min_tokens": st.integers(-1, 70),
    "stream": st.booleans(),
    "max_tokens": st.integers(0, 70),
}


@st.composite
def bodies(draw, schema):
    names = draw(st.lists(st.sampled_from([*schema.model_fields, "unknown", "tools"]), max_size=5, unique=True))
    names += [name for name in ("messages", "prompt", "tokens") if name in schema.model_fields]
    body = {name: draw(LIKELY.get(name, JSON) if draw(st.booleans()) else JSON) for name in names}
    return json.dumps(body).encode()


HEADERS = st.dictionaries(
    st.sampled_from(["content-type", "content-length", "host", "origin", "authorization", "x-request-id", "accept"]),
    st.binary(max_size=30) | st.sampled_from([b"application/json", b"127.0.0.1", b"9" * 5000, b"Bearer right"]),
    max_size=3,
)


@pytest.mark.parametrize("serving", [{}, {"api_key": "right", "request_timeout_s": 60.0}])
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_is_answered_or_refused_in_openais_shape(make_service, path, serving, data):
    client = asking(make_service(**serving))
    body = data.draw(bodies(PATHS[path]) | JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=50))
    headers = {"content-type": b"application/json", "authorization": b"Bearer right", **data.draw(HEADERS)}
    check(client.request("POST", path, content=body, headers=list(headers.items())))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(["/v1/models", "/v1/models/x", "/dashboard/data", "/health", "/metrics", "/dashboard/y"]),
    query=st.text(st.characters(max_codepoint=255), max_size=30) | st.integers(0, 10**9).map(lambda n: f"{n}" * 600),
    headers=HEADERS,
    method=st.sampled_from(["GET", "HEAD", "OPTIONS", "DELETE", "POST"]),
)
def test_any_question_is_answered_or_refused_in_openais_shape(service, path, query, headers, method):
    url = httpx.URL(f"http://127.0.0.1{path}", params={"seconds": query})
    check(asking(service).request(method, url, headers=list(headers.items()), follow_redirects=False))


def check(response):
    assert response.status_code < 500
    if response.status_code >= 400 and response.request.method != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
