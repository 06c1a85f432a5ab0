"""Limits on the work that a small request can cause."""

from __future__ import annotations

import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from pydantic import ValidationError

from serving.api import checks, engine_requests
from serving.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest
from serving.api.tokenizer_routes import LARGEST, LONG
from tests.tiny import tokenizer
from tests.unit.serving.answers import CHAT, asking, error_of, refusal_of
from tests.waiting import HANG_SECONDS

MESSAGE = CHAT["messages"][0]


@pytest.fixture
def no_work(monkeypatch):
    """Fail the test if a sequence is created or a draft is planned."""

    def worked(*arguments):
        raise AssertionError("work was done")

    monkeypatch.setattr(engine_requests, "seed_of", worked)
    monkeypatch.setattr(checks, "_policy", worked)


def test_prompts_times_choices_over_the_queue_are_400(client, service, no_work):
    error = error_of(client.post("/v1/completions", json={"prompt": [[5]] * 17, "n": 8}), 400)
    assert (error["param"], error["code"]) == ("n", "invalid_value")
    assert "136" in error["message"]
    assert "128" in error["message"]
    error = error_of(client.post("/v1/completions", json={"prompt": [[5]] * 200_000, "n": 8}), 400)
    assert error["message"] == "'prompt' has 200000 entries and this server's limit is 128."
    assert service.submitted == []


def test_full_queue_is_reported_before_a_prompt_is_encoded(make_service):
    service = make_service(max_queue=2)
    service.encode = lambda text, special, limit=None: pytest.fail("it was encoded")
    client = asking(service)
    assert error_of(client.post("/v1/completions", json={"prompt": "a", "n": 3}), 400)["param"] == "n"


@pytest.mark.parametrize(("schema", "body"), [
    (ChatRequest, {"messages": [{"role": "user"}] * 200}),
    (ChatRequest, {"messages": [MESSAGE] * 5000}),
    (ChatRequest, {"messages": [MESSAGE], **{f"field_{number}": 1 for number in range(5000)}}),
    (ChatRequest, {"messages": [MESSAGE], "stop": [""] * 5000}),
    (ChatRequest, {"messages": [MESSAGE], "metadata": {f"name{number}": 1 for number in range(5000)}}),
    (ChatRequest, {"messages": [MESSAGE], "chat_template_kwargs": {f"name{number}": [] for number in range(5000)}}),
    (CompletionRequest, {"prompt": [[5]] * 5000}),
    (DetokenizeRequest, {"tokens": [-1] * 5000}),
    (ChatRequest, {"messages": [MESSAGE], "osd": {"growth": {"kind": "static_tree", "acceptance": [2] * 5000}}}),
    (ChatRequest, {"messages": [MESSAGE], "osd": {"growth": {"kind": "sparse_tree", "ranks": [[2] * 9] * 5000}}}),
])  # fmt: skip
def test_validation_stops_after_the_first_errors(schema, body):
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 3


@pytest.mark.parametrize(("name", "value", "least"), [
    ("metadata", {"n" * 65: ""}, "64 characters"), ("metadata", {"name": "v" * 513}, "512 characters"),
    ("metadata", dict.fromkeys(map(str, range(17)), ""), "17 entries and the limit is 16"),
    ("chat_template_kwargs", {"n" * 65: 1}, "64 characters"),
    ("chat_template_kwargs", {f"n{number}": 1 for number in range(33)}, "33 entries and the limit is 32"),
])  # fmt: skip
def test_objects_are_limited_in_entries_and_lengths(client, name, value, least):
    error = error_of(client.post("/v1/chat/completions", json={**CHAT, name: value}), 400)
    assert error["param"].startswith(name)
    assert least in error["message"]


def test_detokenize_limits_the_number_of_tokens(client, service):
    most = max(service.model.context, LONG)
    assert client.post("/detokenize", json={"tokens": [1] * most}).status_code == 200
    service.decode = lambda ids: pytest.fail("it was decoded")
    error = error_of(client.post("/detokenize", json={"tokens": [1] * (most + 1)}), 400)
    assert error["message"] == f"'tokens' has {most + 1} entries and the limit is {most}."


def test_body_is_not_kept_while_the_request_runs(client, service, monkeypatch):
    bodies, alive = [], []
    prepare = engine_requests.EngineRequests.chat

    async def remember(self, body, caller):
        bodies.append(weakref.ref(body))
        return await prepare(self, body, caller)

    submit = service.submit

    def look(*arguments, **more):
        alive.extend(body() is not None for body in bodies)
        return submit(*arguments, **more)

    monkeypatch.setattr(engine_requests.EngineRequests, "chat", remember)
    service.submit = look
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert alive == [False]


def test_tokenize_limits_the_number_of_messages(make_service):
    client = asking(make_service(max_messages=2))
    error = error_of(client.post("/tokenize", json={"messages": [MESSAGE] * 3}), 400)
    assert error["message"] == "'messages' has 3 entries and this server's limit is 2."


def test_tokenize_limits_the_bytes_of_its_body(make_service):
    service = make_service()
    client, room = asking(service), len(json.dumps({"prompt": ""}, separators=(",", ":")))
    assert client.post("/tokenize", json={"prompt": "x" * (LARGEST - room)}).status_code == 200
    error = error_of(client.post("/tokenize", json={"prompt": "x" * (LARGEST - room + 1)}), 413)
    assert error["message"] == f"The body is larger than {LARGEST} bytes."
    service.model = replace(service.model, context=LARGEST)
    assert asking(service).post("/tokenize", json={"prompt": "x" * LARGEST}).status_code == 200
    small = asking(make_service(max_body_bytes=1024))
    assert error_of(small.post("/tokenize", json={"prompt": "x" * 1024}), 413)


@pytest.mark.parametrize("stop", ["x" * 4097, ["x" * 2048, "y" * 2049]])
def test_stop_strings_are_limited_in_length(client, service, stop):
    answer = client.post("/v1/completions", json={"prompt": "a", "stop": stop})
    refusal_of(answer, "stop", "4097 characters and the limit is 4096")
    assert client.post("/v1/completions", json={"prompt": "a", "stop": "x" * 4096}).status_code == 200


@pytest.mark.parametrize("growth", [
    {"kind": "static_tree", "budget": 256, "depth": 32, "acceptance": [0.5] * 32},
    {"kind": "sparse_tree", "budget": 256, "ranks": [[0.5] * 32] * 32},
    {"kind": "static_tree", "budget": 65, "depth": 8},
    {"kind": "top_k_tree", "budget": 65},
])  # fmt: skip
def test_draft_over_the_limit_is_400_before_planning(client, no_work, growth):
    answer = client.post("/v1/completions", json={"prompt": "a", "osd": {"growth": growth}})
    refusal_of(answer, "osd.growth", "this server's limit is 64")


@pytest.mark.parametrize(
    "growth", [{"kind": "static_tree", "acceptance": [0.5] * 33}, {"kind": "sparse_tree", "ranks": [[0.5]] * 33}]
)
def test_acceptance_rates_of_a_tree_are_limited_in_number(client, growth):
    error = error_of(client.post("/v1/completions", json={"prompt": "a", "osd": {"growth": growth}}), 400)
    assert error["param"].startswith("osd.growth.")
    assert "32" in error["message"]


def test_long_text_does_not_block_short_texts(client, service):
    encode, encoded, other_done = service.encode, threading.Event(), threading.Event()

    def slowly(text, special, limit=None):
        if len(text) >= LONG:
            encoded.set()
            assert other_done.wait(HANG_SECONDS)
        return encode(text, special)

    service.encode = slowly
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(client.post, "/tokenize", json={"prompt": "a" * LONG})
        assert encoded.wait(HANG_SECONDS)
        assert client.post("/tokenize", json={"prompt": "a"}).json()["count"] == 2
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        other_done.set()
        assert long.result().json()["count"] == LONG + 1


@pytest.mark.parametrize("part", [
    {"content": "a" * LONG}, {"content": "a", "reasoning_content": "a" * LONG},
    {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": json.dumps({"text": "a" * LONG})}}]},
], ids=["content", "thinking", "call"])  # fmt: skip
def test_long_part_of_a_chat_is_encoded_with_long_texts(client, service, part):
    threads = []
    encode_chat = service.encode_chat

    def look(*arguments):
        threads.append(threading.current_thread().name)
        return encode_chat(*arguments)

    service.encode_chat = look
    client.post("/tokenize", json={"messages": [MESSAGE, {"role": "assistant", **part}, MESSAGE]})
    client.post("/tokenize", json={"messages": [MESSAGE]})
    assert [name.rpartition("_")[0] for name in threads] == ["tokenize-long", "tokenize-short"]


def test_tokenizer_used_once_can_be_shared_by_two_threads():
    shared = tokenizer()
    shared.backend_tokenizer.enable_truncation(7)
    shared("")
    texts = [letter * size for letter in "ab" for size in (10, 20_000)] * 20
    with ThreadPoolExecutor(2) as pool:
        encoded = list(pool.map(lambda text: shared(text, add_special_tokens=True)["input_ids"], texts))
    assert [len(ids) for ids in encoded] == [len(text) for text in texts]


def test_draft_is_planned_outside_the_event_loop(client, service, monkeypatch):
    planned = []

    def plan(growth, verification):
        planned.append(threading.current_thread().name)

    monkeypatch.setattr(checks, "_policy", plan)
    body = {"prompt": "a", "osd": {"growth": {"kind": "static_tree", "budget": 64, "depth": 32}}}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert [name.startswith("tokenize") for name in planned] == [True]
