from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from osd.engine.request import Sampling, SpeculationCounts, TokenLogprobs, Update
from serving.routes import create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events_of(response):
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_completion_has_openais_shape_the_usage_and_the_acceptance(client, service):
    body = client.post("/v1/chat/completions", json={**CHAT, "model": "tiny"}).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.5,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [1, 1],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 1,
        "num_draft_tokens": 4,
    }
    assert service.submitted[0].prompt_ids == tuple(map(ord, "uhi"))


def test_what_no_choice_of_a_prompt_had_to_read_is_cached(client, service):
    cached = {0: 2, 1: 3, 2: 1, 3: 4}
    service.script = lambda request: [
        Update(request.id, (1,), "a", "stop", SpeculationCounts(), cached_tokens=cached[len(service.submitted) - 1])
    ]
    body = client.post("/v1/completions", json={"prompt": ["high", "highest"], "n": 2}).json()
    assert body["usage"]["prompt_tokens"] == 13
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 + 1}


def test_the_finish_reason_is_the_engines(client, service):
    service.script = lambda request: [Update(request.id, (1,), "a", "length", SpeculationCounts())]
    body = client.post("/v1/completions", json={"prompt": "hi"}).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}]


def test_sampling_settings_reach_the_engine(client, service):
    numbers = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.01,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "seed": 5,
    }
    fields = {**numbers, "logit_bias": {"7": -3}, "stop": "X", "ignore_eos": True, "max_tokens": 9}
    client.post("/v1/completions", json={"prompt": "hi", **fields})
    request = service.submitted[0]
    assert request.sampling == Sampling(**numbers, logit_bias=((7, -3.0),), repeatable=True)
    assert (request.stop, request.ignore_eos, request.max_tokens) == (("X",), True, 9)


def test_defaults_are_openais(client, service):
    client.post("/v1/completions", json={"prompt": "hi", "top_k": -1})
    client.post("/v1/chat/completions", json=CHAT)
    text, chat = service.submitted
    assert text.sampling == Sampling(seed=text.sampling.seed)
    assert text.logprobs is chat.logprobs is None
    assert text.max_tokens == 16
    assert chat.max_tokens == 64 - 3
    assert text.sampling.seed != chat.sampling.seed


def test_a_request_may_say_how_it_speculates(client, service):
    for osd in ({"growth": {"kind": "chain", "depth": 2}, "verification": "block"}, {"verification": "naive"}, {}):
        assert client.post("/v1/completions", json={"prompt": "hi", "osd": osd}).status_code == 200
    client.post("/v1/completions", json={"prompt": "ho", "osd": {"verification": "naive"}})
    own, rule_only, none, same = (request.policy for request in service.submitted)
    assert (own.growth.name, own.growth.max_nodes, own.rule.name) == ("chain", 2, "block")
    assert (rule_only.growth.name, rule_only.rule.name) == (service.settings.growth.kind, "naive")
    assert none is None
    assert same is rule_only  # what speculates alike drafts together


def test_a_request_may_say_its_domain_and_else_it_is_found_out(client, service):
    for osd in ({"domain": "code-2"}, {"verification": "naive"}, None):
        assert client.post("/v1/completions", json={"prompt": "hi", "osd": osd}).status_code == 200
    assert [request.domain for request in service.submitted] == ["code-2", None, None]


@pytest.mark.parametrize(
    ("osd", "param", "reason"),
    [
        ({"growth": {"kind": "forest"}}, "osd.growth.kind", "should be 'chain'"),
        ({"growth": {"depth": 0}}, "osd.growth.depth", "greater than or equal to 1"),
        ({"growth": {"kind": "chain", "budget": 9}}, "osd.growth", "budget is not read by kind chain"),
        (
            {"growth": {"kind": "dynamic_tree", "budget": 65}, "verification": "siblings"},
            "osd.growth",
            "up to 65 tokens and this server's limit is 64",
        ),
        ({"growth": {"kind": "top_k_tree"}, "verification": "siblings"}, "osd", "siblings would bias the output"),
        ({"growth": {"kind": "chain", "governed": True}}, "osd.growth.governed", "is not supported"),
        ({"verification": "typical"}, "osd.verification", "should be 'chain'"),
        ({"drafter": "mine"}, "osd.drafter", "is not supported"),
        ({"domain": "../etc"}, "osd.domain", "should match pattern"),
        ({"domain": ""}, "osd.domain", "should match pattern"),
    ],
)
def test_speculation_that_is_unknown_or_would_bias_the_output_is_refused_by_name(client, service, osd, param, reason):
    error = error_of(client.post("/v1/completions", json={"prompt": "hi", "osd": osd}), 400)
    assert error["param"] == param
    assert reason in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize(
    ("default", "store", "captured"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_store_decides_whether_a_request_is_learned_from(make_service, default, store, captured):
    service = make_service(capture_default=default)
    with TestClient(create_app(service)) as client:
        client.post("/v1/completions", json={"prompt": "hi", "store": store})
    assert service.submitted[0].capture is captured


def test_choices_have_seeds_of_their_own_and_the_first_is_that_of_a_single_one(client, service):
    body = client.post("/v1/completions", json={"prompt": ["hi", [5, 6]], "n": 3, "seed": 11}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    seeds = [request.sampling.seed for request in service.submitted]
    assert seeds[0] == 11
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    assert all(request.sampling.repeatable for request in service.submitted)
    assert len({request.id for request in service.submitted}) == 6
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 18,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 24


def test_a_stream_has_one_event_per_round_and_ends_with_done(client):
    first, last = events_of(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "Hel"}
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["delta"] == {"content": "lo"}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in first
    assert first["id"] == last["id"]


def test_a_stream_reports_usage_and_acceptance_on_its_last_event(client):
    options = {"include_usage": True}
    *_, before, last = events_of(
        client.post("/v1/completions", json={"prompt": "hi", "stream": True, "stream_options": options})
    )
    assert before["usage"] is None
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


def test_continuous_usage_counts_up_with_every_event(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(client.post("/v1/completions", json={"prompt": "hi", "stream": True, "stream_options": options}))
    assert [event["usage"]["completion_tokens"] for event in events] == [2, 3, 3]


def with_logprobs(request):
    """Three tokens in three updates; the second is no whole character and the third was impossible."""
    places = [
        TokenLogprobs(97, -0.5, ((97, -0.5), (98, -1.5))),
        TokenLogprobs(0x24E, -3.0, ((98, -0.1), (99, -2.0))),
        TokenLogprobs(99, float("-inf"), ((97, -0.25), (98, -2.5))),
    ]
    places = [TokenLogprobs(p.token, p.logprob, p.top[: request.logprobs]) for p in places]
    return [
        Update(request.id, (97, 0x24E), "a", logprobs=tuple(places[:2])),
        Update(request.id, (), ""),
        Update(request.id, (99,), "c", "stop", SpeculationCounts(), logprobs=tuple(places[2:])),
    ]


@pytest.fixture
def telling(service):
    """A service that reports log-probabilities and has a token that is no whole character."""
    service.script = with_logprobs
    service.decode = lambda ids: "".join("\ufffd" if token == 0x24E else chr(token) for token in ids)
    return service


def chat_entry(text, logprob, encoded):
    return {"token": text, "logprob": logprob, "bytes": encoded}


CHAT_LOGPROBS = [
    {
        **chat_entry("a", -0.5, [97]),
        "top_logprobs": [chat_entry("a", -0.5, [97]), chat_entry("b", -1.5, [98])],
    },
    {
        **chat_entry("\ufffd", -3.0, None),
        "top_logprobs": [chat_entry("b", -0.1, [98]), chat_entry("c", -2.0, [99])],
    },
    {
        **chat_entry("c", -9999.0, [99]),
        "top_logprobs": [chat_entry("a", -0.25, [97]), chat_entry("b", -2.5, [98])],
    },
]


def test_a_chat_reports_logprobs_in_openais_shape(client, telling):
    fields = {**CHAT, "logprobs": True, "top_logprobs": 2}
    (choice,) = client.post("/v1/chat/completions", json=fields).json()["choices"]
    assert telling.submitted[0].logprobs == 2
    assert choice["logprobs"] == {"content": CHAT_LOGPROBS, "refusal": None}


def test_a_stream_of_a_chat_reports_the_logprobs_of_its_own_tokens_with_each_event(client, telling):
    fields = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": True}
    events = events_of(client.post("/v1/chat/completions", json=fields))
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert parts == [
        {"content": CHAT_LOGPROBS[:2], "refusal": None},
        None,
        {"content": CHAT_LOGPROBS[2:], "refusal": None},
    ]


def test_a_completion_reports_logprobs_and_where_each_token_begins(client, telling):
    body = client.post("/v1/completions", json={"prompt": ["x", "y"], "logprobs": 1}).json()
    for choice in body["choices"]:
        assert choice["logprobs"] == {
            "tokens": ["a", "\ufffd", "c"],
            "token_logprobs": [-0.5, -3.0, -9999.0],
            "top_logprobs": [{"a": -0.5}, {"\ufffd": -3.0, "b": -0.1}, {"c": -9999.0, "a": -0.25}],
            "text_offset": [0, 1, 2],
        }


def test_a_stream_of_a_completion_counts_its_text_offsets_on(client, telling):
    events = events_of(client.post("/v1/completions", json={"prompt": "x", "logprobs": 0, "stream": True}))
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [part and part["text_offset"] for part in parts] == [[0, 1], None, [2]]
    assert parts[0]["top_logprobs"] == [{"a": -0.5}, {"\ufffd": -3.0}]


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused(client, service):
    error = error_of(client.post("/v1/completions", json={"prompt": "hi", "logit_bias": {"592": 1}}), 400)
    assert (error["param"], error["code"]) == ("logit_bias", "invalid_value")
    assert "592" in error["message"]
    assert client.post("/v1/completions", json={"prompt": "hi", "logit_bias": {"591": 1}}).status_code == 200
    assert len(service.submitted) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_an_http_code(client, service, stream):
    service.script = lambda request: [Update(request.id, (), "", "error", error="SECRET")]
    response = client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
    assert error_of(response, 500)["type"] == "server_error"
    assert "SECRET" not in response.text


def test_a_failure_after_the_first_token_is_an_event(client, service):
    service.script = lambda request: [
        Update(request.id, (1,), "a"),
        Update(request.id, (), "", "error", error="SECRET"),
    ]
    response = client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert events_of(response)[-1]["error"]["type"] == "server_error"
    assert "SECRET" not in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_404(client, path):
    bodies = {"/v1/chat/completions": CHAT, "/detokenize": {"tokens": [1]}}
    response = client.post(path, json={**bodies.get(path, {"prompt": "hi"}), "model": "SECRET"})
    assert error_of(response, 404)["code"] == "model_not_found"
    assert "SECRET" not in response.text


def test_a_prompt_that_is_too_long_is_refused_before_any_compute(client, service):
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


def test_more_tokens_than_fit_are_refused_and_not_cut(client, service):
    response = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 62})
    assert error_of(response, 400)["code"] == "context_length_exceeded"
    assert client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 61}).status_code == 200
    assert service.submitted[0].max_tokens == 61


def test_the_default_of_max_tokens_is_cut_to_what_fits(client, service):
    assert client.post("/v1/completions", json={"prompt": "x" * 55}).status_code == 200
    assert service.submitted[0].max_tokens == 8


def test_the_servers_own_limit_of_tokens_is_named(make_service):
    client = TestClient(create_app(make_service(max_completion_tokens=5)))
    error = error_of(client.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 6}), 400)
    assert error["param"] == "max_completion_tokens"
    assert "5" in error["message"]


def test_unknown_token_ids_and_empty_prompts_are_refused(client, service):
    assert error_of(client.post("/v1/completions", json={"prompt": [0x250]}), 400)["param"] == "prompt"
    assert error_of(client.post("/v1/completions", json={"prompt": [[1], []]}), 400)["param"] == "prompt"
    assert error_of(client.post("/detokenize", json={"tokens": [0x250]}), 400)["param"] == "tokens"
    assert service.submitted == []


def test_too_many_messages_are_refused(make_service):
    client = TestClient(create_app(make_service(max_messages=2)))
    error = error_of(client.post("/v1/chat/completions", json={"messages": CHAT["messages"] * 3}), 400)
    assert "2" in error["message"]


def test_an_order_of_messages_that_the_template_refuses_is_400(client):
    body = {"messages": [{"role": "assistant", "content": "SECRET"}]}
    response = client.post("/v1/chat/completions", json=body)
    assert error_of(response, 400)["param"] == "messages"
    assert "SECRET" not in response.text


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_413(make_service, declared):
    client = TestClient(create_app(make_service(max_body_bytes=1024)))
    body = json.dumps({"prompt": "x" * 2000}).encode()
    content = body if declared else (body[i : i + 100] for i in range(0, len(body), 100))
    assert error_of(client.post("/v1/completions", content=content), 413)["code"] == "request_too_large"


def test_models_are_listed_with_id_and_root(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["root"], card["object"], card["max_model_len"]) == ("tiny", "some/where", "model", 64)
    assert client.get("/v1/models/tiny").json() == card
    assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_tokenize_and_detokenize_are_each_others_inverse(client):
    body = client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    assert body == {"count": 2, "max_model_len": 64, "tokens": [104, 105]}
    assert client.post("/tokenize", json={"prompt": "hi"}).json()["count"] == 3
    assert client.post("/tokenize", json=CHAT).json()["count"] == 3
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "hi"}
    assert error_of(client.post("/tokenize", json={}), 400)["param"] == "prompt"


def test_health_follows_the_engine(client, service):
    assert client.get("/health").status_code == 200
    service.healthy = False
    assert error_of(client.get("/health"), 503)["type"] == "server_error"


def test_unknown_paths_and_methods_have_openais_error_shape(client):
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)


def test_an_error_that_nobody_foresaw_tells_nothing_of_itself(client, service):
    def fail(request):
        raise RuntimeError("SECRET")

    service.script = fail
    response = client.post("/v1/completions", json={"prompt": "hi"})
    assert error_of(response, 500)["type"] == "server_error"
    assert "SECRET" not in response.text
    service.script = lambda request: [Update(request.id, (1,), "a", "stop", SpeculationCounts())]
    for _ in range(200):  # its place in the queue was given back
        assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


PATHS = ["/v1/models", "/metrics", "/dashboard", "/dashboard/data", "/v1/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Basic right", "right", "Bearer", "Bearer rightright", "Bearer ä"]
)
def test_without_the_key_every_path_but_health_is_401(make_service, path, header):
    client = TestClient(create_app(make_service(api_key="right")))
    headers = {} if header is None else {"Authorization": header.encode()}
    response = client.get(path, headers=headers)
    assert response.status_code == 401
    if path != "/dashboard":  # its 401 is the page that asks for the key
        assert error_of(response, 401)["code"] == "invalid_api_key"
    assert client.get("/health").status_code == 200


def test_with_the_key_everything_answers(make_service):
    client = TestClient(create_app(make_service(api_key="right")), headers={"Authorization": "Bearer right"})
    for path in PATHS[:-1]:
        assert client.get(path).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
