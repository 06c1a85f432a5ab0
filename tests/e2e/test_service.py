"""HTTP API of a running service."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.clients import ClientThread
from tests.collector import Collector, attributes_of
from tests.e2e.conftest import REPLICAS
from tests.waiting import HANG_SECONDS


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_receives_an_answer(service, client):
    model = client.models.list().data[0]
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    answer = client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=20, temperature=0
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens == 20 or choice.finish_reason == "stop"
    assert (
        answer.usage.prompt_tokens
        == service.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hello"}]}).json()["count"]
    )
    speculation = answer.model_extra["metrics"]["speculative_decoding"]
    assert speculation["num_spec_steps"] > 0
    assert speculation["num_draft_tokens"] >= speculation["num_accepted_draft_tokens"]
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]


def test_stream_equals_the_complete_answer(client):
    fields = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 40, "temperature": 0.8, "seed": 3}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    streamed = chunks[-1].usage
    assert streamed.to_dict() | {"prompt_tokens_details": None} == whole.usage.to_dict() | {
        "prompt_tokens_details": None
    }
    # The number of cached tokens depends on the replica that answers and its earlier requests.
    assert 0 <= streamed.prompt_tokens_details.cached_tokens < whole.usage.prompt_tokens
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    rounds = len(chunks) - 1
    assert rounds <= whole.usage.completion_tokens


def set_speculation(service, eventually, on):
    """Switch speculation and wait until every replica has reported it."""
    service.handle.set_speculation.remote(on).result()
    eventually(lambda: [replica["speculation"] for replica in service.data()["replicas"]] == [on] * REPLICAS)


def test_output_does_not_depend_on_speculation(service, client, eventually):
    prompts = ["a", "The quick brown fox", "1 2 3 4", "if x:"]

    def greedy():
        return [service.complete(prompt, max_tokens=60).json() for prompt in prompts]

    with_drafts = greedy()
    try:
        set_speculation(service, eventually, False)
        plain = greedy()
    finally:
        set_speculation(service, eventually, True)
    assert [answer["choices"] for answer in plain] == [answer["choices"] for answer in with_drafts]
    assert all(answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0 for answer in plain)
    assert all(answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0 for answer in with_drafts)


def test_seed_repeats_choices_and_logprobs(client):
    def ask(seed):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, n=2, seed=seed,
            temperature=1.2, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"65": 3}, logprobs=True,
            top_logprobs=2, extra_body={"min_p": 0.001, "repetition_penalty": 1.1, "top_k": 100, "ignore_eos": True},
        )  # fmt: skip
        for choice in answer.choices:
            assert len(choice.logprobs.content) == 12
            for place in choice.logprobs.content:
                assert place.logprob <= place.top_logprobs[0].logprob <= 0
                assert len(place.top_logprobs) == 2
        return [[place.token for place in choice.logprobs.content] for choice in answer.choices]

    first = ask(5)
    assert first[0] != first[1]
    assert ask(5) == first != ask(6)


def test_answer_of_over_four_mebibytes_arrives(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=900, n=4, logprobs=True,
        top_logprobs=20, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert [len(choice.logprobs.content) for choice in answer.choices] == [900] * 4
    assert len(answer.model_dump_json()) > 4 << 20


def test_errors_reach_the_openai_client(client):
    chat = client.chat.completions.create
    hello = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(model="tiny", messages=hello, presence_penalty=2.5)
    assert caught.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError):
        chat(model="other", messages=hello)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(model="tiny", messages=[{"role": "user", "content": "x" * 2000}], stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as status:
        client.completions.create(model="tiny", prompt="x" * (2 << 20))
    assert status.value.status_code == 413


def running(service):
    return service.metric("osd_running_requests") + service.metric("osd_waiting_requests")


@pytest.mark.fault(
    "more requests arrive than the queue holds",
    "429 with Retry-After, and the service recovers",
    process="replica: more requests than it holds",
)
def test_full_queue_is_429_and_recovers(service, eventually):
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 6, "stream": True}
    refused, lines = None, []
    with contextlib.ExitStack() as responses:
        for _ in range(20):
            response = responses.enter_context(service.http.stream("POST", "/v1/completions", json=body))
            if response.status_code == 429:
                refused = response
                break
            assert response.status_code == 200
            lines.append(response.iter_lines())  # deleting an iterator would close its connection
            next(lines[-1])
        assert refused is not None
        assert refused.headers["retry-after"] == "1"
        assert json.loads(refused.read())["error"]["code"] == "queue_full"
    eventually(lambda: running(service) == 0)
    assert service.complete().status_code == 200


def test_metrics_are_sums_over_all_replicas(service, eventually):
    eventually(lambda: running(service) == 0)
    set_speculation(service, eventually, False)
    set_speculation(service, eventually, True)  # now both replicas have reported all earlier requests
    with ThreadPoolExecutor(4) as pool:
        before = {name: service.metric(name) for name in COUNTERS}
        usage = [
            answer.json()["usage"] for answer in pool.map(lambda i: service.complete(f"prompt {i % 10}"), range(24))
        ]
    tokens = sum(counts["completion_tokens"] for counts in usage)
    cached = sum(counts["prompt_tokens_details"]["cached_tokens"] for counts in usage)

    def increments():
        return [service.metric(name) - before[name] for name in COUNTERS]

    expected = [tokens, 24, 8 * 24, cached, 8 * 24, tokens, 24]
    eventually(lambda: increments()[:-1] == expected)
    assert cached > 0
    assert all(increments()[:-1] == expected and increments()[-1] > 0 for _ in range(10)), "whichever replica answers"
    assert len(service.data()["replicas"]) == REPLICAS


COUNTERS = (
    "osd_completion_tokens_total", "osd_requests_total", "osd_prompt_tokens_total", "vllm:prefix_cache_hits_total",
    "vllm:request_prompt_tokens_sum", "vllm:request_generation_tokens_sum", "vllm:time_to_first_token_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
)  # fmt: skip


def test_health_is_answered_while_requests_decode(service, eventually):
    def is_answered_during_decoding():
        clients = [ClientThread(service.url, max_tokens=900, stream=True) for _ in range(4)]
        assert all(client.started.wait(HANG_SECONDS) for client in clients)
        assert service.http.get("/health").json() == {"status": "ok"}
        decode = [client.is_alive() for client in clients]
        assert [client.error() for client in clients] == [None] * 4
        return all(decode)

    eventually(is_answered_during_decoding)


def test_log_and_trace_of_a_request_hold_no_user_text(service, eventually):
    prompt, key = "unmistakable-prompt-4711", "sk-unmistakable-key-0815"
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"authorization": f"Bearer {key}", "traceparent": f"00-{trace}-{span}-01", "x-request-id": "client-id"}
    collector = Collector(int(service.settings.serving.otlp_endpoint.rpartition(":")[2]))
    try:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = service.http.post("/v1/completions", json=body, headers=headers).json()
        drafts = answer["metrics"]["speculative_decoding"]
        eventually(lambda: any(each.trace_id.hex() == trace for each in collector.spans()))
        spans = {each.name: each for each in collector.spans() if each.trace_id.hex() == trace}
    finally:
        collector.close()
    log = service.settings.log.file.read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    (line,) = (each for each in lines if each.get("response_id") == answer["id"])
    assert (line["request_id"], line["trace_id"], line["rounds"]) == ("client-id", trace, drafts["num_spec_steps"])
    assert 0 <= line["queue_seconds"] < line["first_token_seconds"] <= line["seconds"]
    decode = attributes_of(spans["decode"])
    assert (decode["osd.rounds"], decode["osd.drafter_version"]) == (line["rounds"], line["version"])
    assert spans["POST /v1/completions"].parent_span_id.hex() == span
    for secret in (prompt, key):
        assert secret not in log
        assert all(secret.encode() not in sent for sent in collector.bodies)
