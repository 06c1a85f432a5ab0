"""Real requests and responses match the API reference."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from osd import __version__
from osd.config import Settings
from osd.engine.completion import JudgedTokens, SkippedLayers
from osd.engine.request import TokenLogprobs, Update
from osd.metrics import SourceCounts, SpeculationCounts
from serving.api.routes import create_app
from serving.dashboard import router as dashboard_router
from tests.e2e.generated import PATHS, bodies
from tests.unit.serving.answers import CHAT, asking, events_of
from tests.unit.serving.scripted import ScriptedService
from tests.unit.serving.test_tools import ROME, TOOLS

DOCUMENT = asking(ScriptedService(Settings())).get("/openapi.json").json()


def validator_of(name: str) -> Draft202012Validator:
    """Return a validator for the type ``name`` of the document."""
    components = {"components": DOCUMENT["components"]}
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", **components})


def check(name: str, value: object) -> None:
    problems = [error.message for error in validator_of(name).iter_errors(value)]
    assert not problems


def without_kind(path: str) -> str:
    return re.sub(r":\w+}", "}", path)


def test_document_describes_every_api_path():
    routers = [route.original_router for route in create_app(ScriptedService(Settings())).routes]
    paths = {without_kind(route.path) for router in routers for route in router.routes}
    dashboard_paths = {without_kind(route.path) for route in dashboard_router(ScriptedService(Settings())).routes}
    assert paths - set(DOCUMENT["paths"]) == dashboard_paths | {"/openapi.json", "/docs", "/docs/style.css"}
    assert set(DOCUMENT["paths"]) <= paths
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"]["version"] == __version__


def test_document_is_valid_openapi():
    names = set(re.findall(r'"#/components/schemas/(\w+)"', str(DOCUMENT).replace("'", '"')))
    assert names <= set(DOCUMENT["components"]["schemas"])
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            assert operation["summary"].endswith(".")
            assert ("{" in path) == ("parameters" in operation)
    ids = [operation["operationId"] for operations in DOCUMENT["paths"].values() for operation in operations.values()]
    assert len(ids) == len(set(ids))


def test_document_marks_the_paths_that_need_a_key():
    security = {path: next(iter(operations.values())).get("security") for path, operations in DOCUMENT["paths"].items()}
    assert security["/health"] is None
    assert security["/v1/models"] == [{"key": []}, {}]
    assert security["/admin/drafters"] == [{"key": []}]
    locked = asking(ScriptedService(Settings(serving={"api_key": "right"})))
    assert locked.get("/openapi.json").status_code == 200
    assert locked.get("/docs").status_code == 200
    assert locked.get("/v1/models").status_code == 401


def test_stream_schema_accepts_text_and_single_events():
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        validator = Draft202012Validator(content["text/event-stream"]["schema"])
        assert validator.is_valid("data: {}\n\ndata: [DONE]\n\n")
        assert validator.is_valid({"event": "message", "data": "{}"})


def places(tokens):
    return tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (token + 1, -2.0))) for token in tokens)


@pytest.mark.parametrize(("path", "body", "answer", "event"), [
    (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "osd": {"sources": True}},
        "ChatCompletion",
        "ChatChunk",
    ),
    (
        "/v1/completions",
        {"prompt": "hi", "logprobs": 2, "n": 2, "osd": {"sources": True}},
        "TextCompletion",
        "CompletionChunk",
    ),
])  # fmt: skip
def test_complete_and_streamed_responses_match_the_document(client, service, path, body, answer, event):
    drafts = SpeculationCounts(2, 4, 1, [1, 0], [1, 1], {"recall": SourceCounts(4, 1)})
    service.script = lambda request: [
        Update(request.id, (72,), "H", logprobs=places([72]), sources=("target",)),
        Update(
            request.id, (105,), "i", "stop", drafts, logprobs=places([105]), sources=("recall",),
            judged=JudgedTokens(1, 0.9), skipped=SkippedLayers(3, 30),
        ),
    ]  # fmt: skip
    check(answer, client.post(path, json=body).json())
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}, {}):
        response = client.post(path, json={**body, "stream": True, "stream_options": options})
        for streamed in events_of(response):
            check(event, streamed)


def test_responses_with_function_calls_match_the_document(client, service):
    service.script = lambda request: [
        Update(request.id, (1,), f"I look. {ROME[:40]}"),
        Update(request.id, (2,), ROME[40:], "stop", SpeculationCounts(2, 4, 1, [1, 0], [1, 1])),
    ]
    body = {**CHAT, "tools": TOOLS}
    check("ChatCompletion", client.post("/v1/chat/completions", json=body).json())
    for streamed in events_of(client.post("/v1/chat/completions", json={**body, "stream": True})):
        check("ChatChunk", streamed)


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
RIGHT = [
    ("ChatRequest", CHAT),
    ("ChatRequest", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    ("ChatRequest", {**CHAT, "stop": "x", "logit_bias": {"7": -3}, "tools": [], "response_format": {"type": "text"}}),
    ("ChatRequest", {**CHAT, "osd": {"growth": {"kind": "dynamic_tree", "budget": 8}, "verification": "traversal"}}),
    ("ChatRequest", {**CHAT, "osd": {"growth": {}}}),
    ("ChatRequest", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
    ("ChatRequest", {**CHAT, "structured_outputs": {"json": "{}"}}),
    ("ChatRequest", {**CHAT, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
    ("ChatRequest", {**CHAT, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ("ChatRequest", {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [CALL]}, RESULT]}),
    ("CompletionRequest", {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}}),
    ("CompletionRequest", {"prompt": [1, 2], "stop": ["x", "y"]}),
    ("CompletionRequest", {"prompt": ["a", [1]], "best_of": 1}),
]
WRONG = [
    ("ChatRequest", {}),
    ("ChatRequest", {**CHAT, "best_of": 1}),
    ("ChatRequest", {**CHAT, "temperature": 3}),
    ("ChatRequest", {**CHAT, "tools": [{}]}),
    ("ChatRequest", {**CHAT, "tool_choice": "perhaps"}),
    ("ChatRequest", {**CHAT, "response_format": {"type": "xml"}}),
    ("ChatRequest", {**CHAT, "structured_outputs": {"regex": 3}}),
    ("ChatRequest", {"messages": [{"role": "assistant", "tool_calls": [{"id": 3}]}]}),
    ("ChatRequest", {**CHAT, "osd": {"growth": {"kind": "no such"}}}),
    ("ChatRequest", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("CompletionRequest", {"prompt": {"text": "hi"}}),
    ("CompletionRequest", {"prompt": "hi", "best_of": 2}),
]


@pytest.mark.parametrize(("name", "body"), RIGHT)
def test_accepted_requests_match_the_document(client, name, body):
    path = {"ChatRequest": "/v1/chat/completions", "CompletionRequest": "/v1/completions"}[name]
    assert client.post(path, json=body).status_code == 200
    check(name, body)


@pytest.mark.parametrize(("name", "body"), WRONG)
def test_malformed_requests_do_not_match_the_document(client, name, body):
    path = {"ChatRequest": "/v1/chat/completions", "CompletionRequest": "/v1/completions"}[name]
    assert client.post(path, json=body).status_code == 400
    assert not validator_of(name).is_valid(body)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_generated_accepted_request_matches_the_document(data):
    path = data.draw(st.sampled_from(sorted(PATHS)))
    body = data.draw(bodies(path))
    try:
        PATHS[path].model_validate_json(body)
    except ValidationError:
        return
    check(PATHS[path].__name__, json.loads(body))


class Page(HTMLParser):
    """Links, anchors, tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.anchors, self.tags, self.text = [], set(), set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attributes = dict(attrs)
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        self.anchors |= {attributes["id"]} if "id" in attributes else set()

    def handle_data(self, data):
        self.text += data


def test_page_needs_no_script_and_no_other_server(client):
    response = client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Page(response.text)
    assert not page.tags & {"script", "iframe", "img"}
    inside = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert inside <= page.anchors
    assert {link for link in page.links if not link.startswith("#")} == {"docs/style.css", "openapi.json"}
    assert client.get("/docs/style.css").headers["content-type"].startswith("text/css")
    for words in ("POST /v1/chat/completions", "GET /v1/models/{model}", "min_tokens", "speculative_decoding"):
        assert words in page.text
