from __future__ import annotations

import codecs
import json
from dataclasses import replace

import pytest

from osd import __version__
from osd.engine.request import SamplingParams, Update
from osd.metrics import SpeculationCounts
from serving.metrics.report import Report
from tests.unit.serving.answers import CHAT, asking, error_of, events_of, refusal_of


def test_chat_completion_has_openai_format_usage_and_metrics(client, service):
    body = client.post("/v1/chat/completions", json={**CHAT, "model": "tiny"}).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.5, "draft_acceptance_rate": 0.25, "acceptance_histogram": [1, 1],
        "num_spec_steps": 2, "num_accepted_draft_tokens": 1, "num_draft_tokens": 4,
    }  # fmt: skip
    assert service.submitted[0].prompt_ids == tuple(map(ord, "uhi"))


def test_cached_tokens_are_the_minimum_over_choices(client, service):
    cached = {0: 2, 1: 3, 2: 1, 3: 4}
    service.script = lambda request: [
        Update(request.id, (1,), "a", "stop", SpeculationCounts(), cached_tokens=cached[len(service.submitted) - 1])
    ]
    body = client.post("/v1/completions", json={"prompt": ["high", "highest"], "n": 2}).json()
    assert body["usage"]["prompt_tokens"] == 13
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 + 1}


def test_finish_reason_comes_from_the_engine(client, service):
    service.script = lambda request: [Update(request.id, (1,), "a", "length", SpeculationCounts())]
    body = client.post("/v1/completions", json={"prompt": "hi"}).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}]


def test_sampling_settings_reach_the_engine(client, service):
    numbers = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.01, "presence_penalty": 0.1, "frequency_penalty": -0.2,
        "repetition_penalty": 1.1, "seed": 5,
    }  # fmt: skip
    fields = {**numbers, "logit_bias": {"7": -3}, "stop": "X", "ignore_eos": True, "max_tokens": 9}
    fields |= {"stop_token_ids": [5, 7], "min_tokens": 4}
    client.post("/v1/completions", json={"prompt": "hi", **fields})
    request = service.submitted[0]
    assert request.sampling == SamplingParams(**numbers, logit_bias=((7, -3.0),), repeatable=True)
    assert (request.stop, request.ignore_eos, request.max_tokens) == (("X",), True, 9)
    assert (request.stop_ids, request.min_tokens) == ((5, 7), 4)


def test_default_sampling_settings_match_openai(client, service):
    client.post("/v1/completions", json={"prompt": "hi", "top_k": -1})
    client.post("/v1/chat/completions", json=CHAT)
    text, chat = service.submitted
    assert text.sampling == SamplingParams(seed=text.sampling.seed)
    assert text.logprobs is chat.logprobs is None
    assert text.max_tokens == 16
    assert chat.max_tokens == 64 - 3
    assert text.sampling.seed != chat.sampling.seed


@pytest.mark.parametrize(("path", "required"), [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hi"}),
])  # fmt: skip
def test_stated_defaults_of_fields_change_nothing(client, service, path, required):
    types = client.get("/openapi.json").json()["components"]["schemas"]

    def defaults(name):
        fields = types[name]["properties"].items()
        return {field: schema["default"] for field, schema in fields if schema.get("default") is not None}

    stated = {**defaults("ChatRequest" if required is CHAT else "CompletionRequest"), "osd": defaults("Speculation")}
    assert len(stated) > 10
    for body in (required, {**required, **stated}):
        assert client.post(path, json=body).status_code == 200
    without, given = (
        replace(request, id="", sampling=replace(request.sampling, seed=0)) for request in service.submitted
    )
    assert replace(given, arrived=without.arrived) == without


def test_request_sets_growth_and_verification(client, service):
    for osd in ({"growth": {"kind": "chain", "depth": 2}, "verification": "block"}, {"verification": "naive"}, {}):
        assert client.post("/v1/completions", json={"prompt": "hi", "osd": osd}).status_code == 200
    client.post("/v1/completions", json={"prompt": "ho", "osd": {"verification": "naive"}})
    full, rule_only, none, same = (request.policy for request in service.submitted)
    assert (full.growth.name, full.growth.max_nodes, full.rule.name) == ("chain", 2, "block")
    assert (rule_only.growth.name, rule_only.rule.name) == (service.settings.growth.kind, "naive")
    assert none is None
    assert same is rule_only  # equal policies are the same object, so that they share a batch


def test_request_can_turn_drafting_off_and_name_a_domain(client, service):
    for osd in ({"speculate": False}, {"speculate": None}, {"domain": "code-2"}, {}, None):
        assert client.post("/v1/completions", json={"prompt": "hi", "osd": osd}).status_code == 200
    passed = [(request.speculate, request.domain) for request in service.submitted]
    assert passed == [(False, None), (True, None), (True, "code-2"), (True, None), (True, None)]


@pytest.mark.parametrize(("osd", "param", "reason"), [
    ({"growth": {"kind": "forest"}}, "osd.growth.kind", "must be 'best_first', 'chain'"),
    ({"growth": {"budget": 0}}, "osd.growth.budget", "greater than or equal to 1"),
    ({"growth": {"kind": "chain", "budget": 9}}, "osd.growth.budget", "is not read by kind chain, which has"),
    (
        {"growth": {"kind": "dynamic_tree", "budget": 65}, "verification": "siblings"},
        "osd.growth",
        "up to 65 tokens and this server's limit is 64",
    ),
    ({"growth": {"kind": "top_k_tree"}, "verification": "siblings"}, "osd", "siblings would bias the output"),
    ({"growth": {"kind": "chain", "governed": True}}, "osd.growth.governed", "is not supported"),
    ({"verification": "typical"}, "osd.verification", "should be 'chain'"),
    ({"drafter": "mine"}, "osd.drafter", "is not supported"),
    ({"speculate": 0}, "osd.speculate", "valid boolean"),
    ({"domain": "../etc"}, "osd.domain", "should match pattern"),
    ({"domain": ""}, "osd.domain", "should match pattern"),
])  # fmt: skip
def test_invalid_or_biased_speculation_is_400(client, service, osd, param, reason):
    refusal_of(client.post("/v1/completions", json={"prompt": "hi", "osd": osd}), param, reason)
    assert service.submitted == []


def test_client_is_a_hash_of_the_key(client, service):
    keys = ["Bearer secret", "bearer secret", "Bearer other", "Basic secret", None]
    for key in keys:
        headers = {} if key is None else {"Authorization": key}
        client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    first, repeated, second, basic, none = (request.client for request in service.submitted)
    assert first == repeated != second
    assert "secret" not in first
    assert first
    assert basic == none == ""


@pytest.mark.parametrize(
    ("default", "store", "captured"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_store_decides_whether_a_request_is_captured(make_service, default, store, captured):
    service = make_service(capture_default=default)
    with asking(service) as client:
        client.post("/v1/completions", json={"prompt": "hi", "store": store})
    assert service.submitted[0].capture is captured


def test_choices_have_different_seeds_and_the_first_is_given(client, service):
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


def test_sequences_without_a_seed_draw_independently(client, service):
    client.post("/v1/completions", json={"prompt": ["hi", "hi"], "n": 3})
    assert len({request.sampling.seed for request in service.submitted}) == 6
    assert not any(request.sampling.repeatable for request in service.submitted)


def test_stream_has_an_event_per_step_and_ends_with_done(client):
    first, last = events_of(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "Hel"}
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["delta"] == {"content": "lo"}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in first
    assert first["id"] == last["id"]


def test_stream_reports_usage_and_metrics_in_its_last_event(client):
    options = {"include_usage": True}
    *_, before, last = events_of(
        client.post("/v1/completions", json={"prompt": "hi", "stream": True, "stream_options": options})
    )
    assert before["usage"] is None
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


def test_continuous_usage_grows_with_every_event(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(client.post("/v1/completions", json={"prompt": "hi", "stream": True, "stream_options": options}))
    assert [event["usage"]["completion_tokens"] for event in events] == [2, 3, 3]


def test_models_are_listed_with_id_and_root(client):
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"], card["object"], card["max_model_len"]) == ("tiny", "some/where", "model", 64)
    assert client.get("/v1/models/tiny").json() == card
    assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_models_include_domains_that_have_drafters(client, service):
    report = Report("r", 0.0, 1, True, {}, domains={"sql": 4, "acme.help": 2})
    service.replicas = [report, replace(report, replica="s", domains={"python": 1})]
    cards = client.get("/v1/models").json()["data"]
    named = [(card["id"], card["parent"]) for card in cards]
    assert named == [("tiny", None), ("tiny:general", "tiny"), ("tiny:python", "tiny"), ("tiny:sql", "tiny")]
    assert client.get("/v1/models/tiny:sql").json() == cards[3]
    answer = client.post("/v1/completions", json={"prompt": "hi", "model": "tiny:sql"}).json()
    assert (answer["model"], service.submitted[-1].domain) == ("tiny:sql", "sql")
    both = {"prompt": "hi", "model": "tiny:sql", "osd": {"domain": "python"}}
    assert error_of(client.post("/v1/completions", json=both), 400)["param"] == "osd.domain"
    for unknown in ("tiny:help", "tiny:acme.help", "tiny:", "tiny:x"):
        refused = client.post("/v1/completions", json={"prompt": "hi", "model": unknown})
        assert error_of(refused, 404)["code"] == "model_not_found"


def test_load_sums_all_replicas_and_version_is_returned(client, service):
    service.replicas = [Report(name, 0.0, 1, True, {}, {"running": 2, "waiting": 3}) for name in "rs"]
    assert client.get("/load").json() == {"server_load": 10}
    assert client.get("/version").json() == {"version": __version__}


def test_detokenize_inverts_tokenize(client):
    body = client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    assert body == {"count": 2, "max_model_len": 64, "tokens": [104, 105]}
    assert client.post("/tokenize", json={"prompt": "hi"}).json()["count"] == 3
    assert client.post("/tokenize", json=CHAT).json()["count"] == 3
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "hi"}
    assert error_of(client.post("/tokenize", json={}), 400)["param"] == "prompt"


def test_health_is_503_when_the_engine_fails(client, service):
    assert client.get("/health").status_code == 200
    service.healthy = False
    error = error_of(client.get("/health"), 503)
    assert error["type"] == "server_error"
    assert error["message"] == "This replica cannot decode: thread ended."


def test_byte_order_mark_before_a_body_is_skipped(client):
    body = codecs.BOM_UTF8 + json.dumps(CHAT).encode()
    headers = {"content-type": "application/json"}
    assert client.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
