from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from serving.api.schemas import ChatRequest, CompletionRequest
from serving.http.errors import from_validation

HI = [{"role": "user", "content": "SECRET"}]


def refusal(schema, **body):
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps(body))
    error = from_validation(caught.value)
    assert error.status == 400
    assert "SECRET" not in json.dumps(error.body)
    return error.body["error"]


def chat(**fields):
    return ChatRequest.model_validate_json(json.dumps({"messages": HI, **fields}))


@pytest.mark.parametrize(("field", "value"), [
    ("top_logprobs", 3),
    ("audio", {"voice": "SECRET"}),
    ("a_field_of_tomorrow", None),
])  # fmt: skip
def test_unsupported_field_is_named_in_the_error(field, value):
    error = refusal(ChatRequest, messages=HI, **{field: value})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize(("fields", "param", "near"), [
    ({"max_token": 5}, "max_token", "max_tokens"),
    ({"topk": 5, "temperature": "SECRET"}, "topk", "top_k"),
    ({"osd": {"domains": "sql"}}, "osd.domains", "osd.domain"),
    ({"messages": [{"role": "user", "contents": "SECRET"}]}, "messages[0].contents", "messages[0].content"),
])  # fmt: skip
def test_error_of_a_misspelt_field_names_a_similar_one(fields, param, near):
    error = refusal(ChatRequest, **{"messages": HI, **fields})
    assert error["message"] == f"'{param}' is not supported; did you mean '{near}'?"
    assert error["param"] == param


NEUTRAL = {
    "tools": [[], None], "presence_penalty": [0], "frequency_penalty": [0.0], "repetition_penalty": [1.0],
    "logprobs": [False, None], "logit_bias": [{}, None], "top_logprobs": [0, None], "min_tokens": [0],
    "response_format": [{"type": "text"}], "metadata": [None, {"ticket": "7"}], "stop": [None], "temperature": [None],
    "user": ["label"], "safety_identifier": ["label"], "prompt_cache_key": ["session"],
    "prompt_cache_retention": ["24h"], "service_tier": ["flex"],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in NEUTRAL for value in NEUTRAL[field]])
def test_neutral_value_of_a_field_is_accepted(field, value):
    chat(**{field: value})


OUT_OF_RANGE = {
    "temperature": [2.1, -0.1, "1", True], "top_p": [0, 1.5], "top_k": [-2], "min_p": [-0.1],
    "presence_penalty": [-2.1, "1"], "frequency_penalty": [2.1, -2.1], "repetition_penalty": [-1, 101],
    "logit_bias": [[1], {"5": -101}, {"5": "SECRET"}, {"5": True}, {"SECRET": 1}, {"-1": 1}], "logprobs": [1, "yes"],
    "top_logprobs": [-1], "n": [0, 9], "max_tokens": [0, 1.5], "priority": [-1, 1001, "1"], "seed": [2**63],
    "stop": [["a", "b", "c", "d", "e"], "", [""]], "stream": ["yes"], "store": [0, 1, "", "false", [], {}],
    "model": [5],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, bad) for field in OUT_OF_RANGE for bad in OUT_OF_RANGE[field]])
def test_value_out_of_range_names_the_field(field, value):
    error = refusal(ChatRequest, messages=HI, **{field: value})
    assert error["param"].startswith(field)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("field", "value", "limit"), [
    ("min_p", 1.1, "1"),
    ("presence_penalty", 2.1, "2"),
    ("repetition_penalty", 0, "0.01"),
    ("logit_bias", {"5": 101}, "between -100 and 100"),
    ("logit_bias", {str(token): 1 for token in range(1025)}, "1025 entries and the limit is 1024"),
    ("top_logprobs", 21, "20"),
])  # fmt: skip
def test_value_beyond_a_limit_names_field_and_limit(field, value, limit):
    error = refusal(ChatRequest, messages=HI, **{field: value})
    assert error["param"].startswith(field)
    assert limit in error["message"]


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_nan_is_refused(field):
    with pytest.raises(ValidationError):
        ChatRequest.model_validate_json(f'{{"messages": [{{"role": "user", "content": "a"}}], "{field}": NaN}}')


def test_logit_bias_becomes_pairs_of_token_and_bias():
    assert chat(logit_bias={"5": 10, "0": -0.5}).logit_bias == [(5, 10.0), (0, -0.5)]


@pytest.mark.parametrize("value", [6, -1, True, "1", 1.5])
def test_text_completion_accepts_at_most_five_logprobs(value):
    assert refusal(CompletionRequest, prompt="a", logprobs=value)["param"] == "logprobs"


def test_top_follows_the_logprobs_fields_of_each_endpoint():
    assert chat().top is None
    assert chat(logprobs=False).top is None
    assert chat(logprobs=True).top == 0
    assert chat(logprobs=True, top_logprobs=20).top == 20
    for logprobs in (None, 0, 5):
        body = json.dumps({"prompt": "a", "logprobs": logprobs})
        assert CompletionRequest.model_validate_json(body).top == logprobs


def test_text_parts_are_joined_and_other_parts_are_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]})
    assert body.messages[0].content == "ab"
    image = [{"type": "image_url", "image_url": {"url": "SECRET"}}]
    error = refusal(ChatRequest, messages=[*HI, {"role": "user", "content": image}])
    assert error["param"] == "messages[1].content"
    assert "image_url" in error["message"]


def test_assistant_message_with_null_fields_is_accepted():
    turn = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []}
    assert ChatRequest.model_validate({"messages": [*HI, turn]}).messages[1].content == "a"
    assert refusal(ChatRequest, messages=[{**turn, "tool_calls": [{"id": "SECRET"}]}])["param"] == (
        "messages[0].tool_calls[0].function"
    )


@pytest.mark.parametrize("messages", [None, [], "SECRET", [{"role": "tool", "content": "SECRET"}], [{"role": "user"}]])
def test_missing_or_invalid_messages_are_refused(messages):
    assert refusal(ChatRequest, messages=messages)["param"].startswith("messages")
    assert refusal(ChatRequest)["message"] == "'messages' is required."


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2]], [[1], [2]]), (["a"], ["a"])],
)
def test_prompt_may_be_text_ids_or_a_list_of_either(prompt, prompts):
    assert CompletionRequest.model_validate_json(json.dumps({"prompt": prompt})).prompt == prompts


@pytest.mark.parametrize("prompt", [None, [], 5, [1, "a"], [-1], [[1, True]], {"a": "SECRET"}, [1.5], [None]])
def test_prompt_of_another_type_is_refused(prompt):
    assert refusal(CompletionRequest, prompt=prompt)["param"] == "prompt"


def test_stream_options_need_a_stream():
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=options).stream_options.include_usage
    assert refusal(ChatRequest, messages=HI, stream_options=options)["param"] == "stream_options"
    unknown = refusal(ChatRequest, messages=HI, stream=True, stream_options={"more": 1})
    assert unknown["param"] == "stream_options.more"


def test_different_token_limits_are_refused():
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert refusal(ChatRequest, messages=HI, max_tokens=5, max_completion_tokens=6)["param"] == "max_tokens"


@pytest.mark.parametrize("body", ["", "{", "nonsense SECRET", '{"messages": "\\ud800"}'])
def test_body_that_is_not_json_is_refused_without_quoting_it(body):
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(body)
    assert from_validation(caught.value).body["error"]["message"] == "The body is not valid JSON."


@pytest.mark.parametrize("body", ["[]", "5", "null", '"SECRET"'])
def test_body_that_is_not_an_object_is_refused(body):
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(body)
    assert from_validation(caught.value).body["error"]["message"] == "The body must be a JSON object."


def test_long_unknown_field_name_is_shortened_in_the_error():
    error = refusal(ChatRequest, messages=HI, **{"x" * 500: 1})
    assert len(error["message"]) < 120
