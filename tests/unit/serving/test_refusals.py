from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from serving.http.errors import ApiError, of_status, stopping
from tests.unit.serving.answers import CHAT, asking, error_of, events_of, refusal_of


def test_logit_bias_of_an_unknown_token_is_400(client, service):
    answer = client.post("/v1/completions", json={"prompt": "hi", "logit_bias": {"592": 1}})
    assert refusal_of(answer, "logit_bias", "592")["code"] == "invalid_value"
    assert client.post("/v1/completions", json={"prompt": "hi", "logit_bias": {"591": 1}}).status_code == 200
    assert len(service.submitted) == 1


def test_every_503_says_when_to_try_again():
    assert ApiError(503, "It stops.").response().headers["retry-after"] == "1"
    assert stopping().response().headers["retry-after"] == "5"
    assert of_status(503, {"Retry-After": "7"}).headers == {"retry-after": "7"}
    assert "retry-after" not in ApiError(500, "It failed.").headers


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_http_500(client, service, stream):
    service.script = lambda request: [Update(request.id, (), "", "error", error="SECRET")]
    response = client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
    assert error_of(response, 500)["type"] == "server_error"
    assert "SECRET" not in response.text


def test_failure_after_the_first_token_is_an_error_event(client, service):
    service.script = lambda request: [
        Update(request.id, (1,), "a"),
        Update(request.id, (), "", "error", error="SECRET"),
    ]
    response = client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert events_of(response)[-1]["error"]["type"] == "server_error"
    assert "SECRET" not in response.text


REFUSAL = "became too complex after 1 tokens of the answer: simplify it"
FORM = {"structured_outputs": {"regex": "a+"}}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/completions", {"prompt": "hi", **FORM}, "structured_outputs.regex"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
])  # fmt: skip
def test_form_that_becomes_too_complex_is_the_requests_error(client, service, path, body, param):
    refused = Update("", (), "", "error", error="GrammarError while decoding", refusal=REFUSAL)
    service.script = lambda request: [replace(refused, request_id=request.id)]
    for stream in (False, True):
        error = error_of(client.post(path, json={**body, "stream": stream}), 400)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"] == f"'{param}' {REFUSAL}."
    service.script = lambda request: [Update(request.id, (1,), "a"), replace(refused, request_id=request.id)]
    assert events_of(client.post(path, json={**body, "stream": True}))[-1]["error"]["param"] == param


@pytest.mark.parametrize(("fields", "param", "reason"), [
    ({"stop_token_ids": [592]}, "stop_token_ids", "not below the vocabulary's size, 592"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "greater than or equal to 0"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "has 65 entries and the limit is 64"),
    ({"min_tokens": 17}, "min_tokens", "'min_tokens' is 17 and the completion may have 16 tokens at most"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "may have 5 tokens at most"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
])  # fmt: skip
def test_impossible_stop_settings_are_400_with_the_limit(client, fields, param, reason):
    error = error_of(client.post("/v1/completions", json={"prompt": "hi", **fields}), 400)
    assert error["param"].startswith(param)
    assert reason in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("depth", [101, 5000])
def test_deep_body_is_400_with_the_limit(client, service, path, depth):
    for field in ("messages", "tools", "response_format", "x"):
        body = f'{{"{field}": {"[" * depth}{"]" * depth}}}'
        error = error_of(client.post(path, content=body, headers={"content-type": "application/json"}), 400)
        assert error["message"] == "The body is nested more than 100 levels deep, which is the limit: flatten it."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_unknown_model_is_404(client, path):
    bodies = {"/v1/chat/completions": CHAT, "/detokenize": {"tokens": [1]}}
    response = client.post(path, json={**bodies.get(path, {"prompt": "hi"}), "model": "SECRET"})
    assert error_of(response, 404)["code"] == "model_not_found"
    assert "SECRET" not in response.text


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/completions", {"prompt": ["a", "b" * 6000]}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "b" * 6000}]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "prediction": {"type": "content", "content": "b" * 6000}}, "prediction"),
])  # fmt: skip
def test_text_certainly_too_long_is_refused_by_its_length(client, service, path, body, param):
    error = error_of(client.post(path, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert re.fullmatch(rf"'{param}' has at least 60\d\d tokens and the limit is 6[34]: shorten it\.", error["message"])
    assert client.post("/tokenize", json={"prompt": "b" * 6000}).json()["count"] == 6001


def test_prompt_over_the_context_is_400_before_submission(client, service):
    for path, body, param in (
        ("/v1/completions", {"prompt": "SECRET" * 20}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "SECRET" * 20}], "stream": True},
            "messages",
        ),
    ):
        response = client.post(path, json=body)
        error = error_of(response, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "121" in error["message"]
        assert "64" in error["message"]
        assert "SECRET" not in response.text
    assert service.submitted == []


def test_max_tokens_over_the_context_is_400(client, service):
    response = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 62})
    assert error_of(response, 400)["code"] == "context_length_exceeded"
    assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 61}).status_code == 200
    assert service.submitted[0].max_tokens == 61


def test_default_max_tokens_is_cut_to_the_context(client, service):
    assert client.post("/v1/completions", json={"prompt": "x" * 55}).status_code == 200
    assert service.submitted[0].max_tokens == 8


def test_max_tokens_over_the_server_limit_is_400(make_service):
    client = asking(make_service(max_completion_tokens=5))
    answer = client.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 6})
    refusal_of(answer, "max_completion_tokens", "5")


def test_unknown_token_ids_and_empty_prompts_are_400(client, service):
    assert error_of(client.post("/v1/completions", json={"prompt": [0x250]}), 400)["param"] == "prompt"
    assert error_of(client.post("/v1/completions", json={"prompt": [[1], []]}), 400)["param"] == "prompt"
    assert error_of(client.post("/detokenize", json={"tokens": [0x250]}), 400)["param"] == "tokens"
    assert service.submitted == []


def test_messages_the_chat_template_refuses_are_400(client):
    body = {"messages": [{"role": "assistant", "content": "SECRET"}]}
    response = client.post("/v1/chat/completions", json=body)
    assert error_of(response, 400)["param"] == "messages"
    assert "SECRET" not in response.text


@pytest.mark.parametrize("declared", [True, False])
def test_body_over_the_size_limit_is_413(make_service, declared):
    client = asking(make_service(max_body_bytes=1024))
    body = json.dumps({"prompt": "x" * 2000}).encode()
    content = body if declared else (body[i : i + 100] for i in range(0, len(body), 100))
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert error_of(response, 413)["code"] == "request_too_large"
    endless = {"content-type": "application/json", "content-length": "9" * 5000}
    assert error_of(client.post("/v1/completions", content=b"{}", headers=endless), 413)["code"] == "request_too_large"


def test_unknown_paths_and_methods_get_openai_errors(client):
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)


def test_unexpected_error_is_500_without_details(client, service):
    def fail(request):
        raise RuntimeError("SECRET")

    service.script = fail
    response = client.post("/v1/completions", json={"prompt": "hi"})
    assert error_of(response, 500)["type"] == "server_error"
    assert "SECRET" not in response.text
    service.script = lambda request: [Update(request.id, (1,), "a", "stop", SpeculationCounts())]
    for _ in range(200):  # more than max_queue: failed requests leave the queue
        assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
