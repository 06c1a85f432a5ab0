"""Rate limits and quotas of keys over HTTP, counted in one process."""

from __future__ import annotations

import asyncio
import time

import pytest
import yaml
from starlette.testclient import TestClient

from osd.engine.request import Update
from serving.access.budgets import Budgets
from serving.access.keys import Key, Limits
from serving.access.windows import Windows
from serving.api.routes import create_app
from tests.unit.serving.answers import CHAT, error_of, events_of
from tests.unit.serving.browser import Browser, until

SECRET = "sk-limited-1"
PROMPT, COMPLETION = 3, 3  # tokens of CHAT and of its answer


@pytest.fixture(autouse=True)
def _frozen_clock(monkeypatch):
    """Stop the clock, so that no window ends during a test."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)


@pytest.fixture
def limited(tmp_path, make_service):
    def limited(**limits):
        file = tmp_path / "keys.yaml"
        file.write_text(yaml.safe_dump([{"name": "a", "key": SECRET, **limits}, {"name": "free", "key": "sk-free-1"}]))
        file.chmod(0o600)
        return make_service(keys_file=file)

    return limited


def client(service, secret=SECRET):
    return TestClient(create_app(service), headers={"Authorization": f"Bearer {secret}"})


def chat(service, secret=SECRET, **body):
    return client(service, secret).post("/v1/chat/completions", json={**CHAT, **body})


def test_request_over_the_minute_limit_gets_429(limited):
    service = limited(requests_per_minute=3)
    for remaining in (2, 1, 0):
        headers = chat(service).raise_for_status().headers
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == str(remaining)
        assert headers["x-ratelimit-reset-requests"] == "2m0s"
    refused = chat(service)
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["message"] == "This key has used its 3 requests a minute. Try again in 1m0s."
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(service.submitted) == 3
    assert chat(service, "sk-free-1").status_code == 200, "limits apply to each key separately"
    assert client(service).get("/health").status_code == 200


def test_key_priority_is_added_to_request_priority(limited):
    service = limited(priority=-3)
    for secret in (SECRET, "sk-free-1"):
        for body in ({}, {"priority": 5}):
            chat(service, secret, **body).raise_for_status()
    assert [request.priority for request in service.submitted] == [-3, 2, 0, 5]


def test_limited_key_gets_rate_limit_headers_in_every_response(limited):
    service = limited(requests_per_minute=9)
    answers = [chat(service, stream=True), chat(service, top_k="x"), client(service).get("/v1/models")]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["8", "7", "6"]
    assert not [name for name in chat(service, "sk-free-1").headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(("limit", "code", "span", "wait"), [
    ("tokens_per_minute", "rate_limit_exceeded", "a minute", 60),
    ("tokens_per_day", "insufficient_quota", "a day", 57_600),
])  # fmt: skip
def test_prompt_and_completion_tokens_are_charged(limited, limit, code, span, wait):
    service = limited(**{limit: PROMPT + COMPLETION + 1})
    first = chat(service)
    assert first.json()["usage"]["total_tokens"] == PROMPT + COMPLETION
    assert first.headers["x-ratelimit-remaining-tokens"] == str(PROMPT + COMPLETION + 1), (
        "the header shows the state at arrival"
    )
    second = chat(service)
    assert second.status_code == 200, "one token was left"
    assert second.headers["x-ratelimit-remaining-tokens"] == "1"
    refused = chat(service)
    error = error_of(refused, 429)
    assert error["code"] == code
    assert f"This key has used its {PROMPT + COMPLETION + 1} tokens {span}." in error["message"]
    assert int(refused.headers["retry-after"]) > wait
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert len(service.submitted) == 2


def test_streams_and_every_choice_are_charged(limited):
    service = limited(tokens_per_minute=1000)
    events_of(chat(service, stream=True))
    assert chat(service, n=2).headers["x-ratelimit-remaining-tokens"] == str(1000 - PROMPT - COMPLETION)
    assert chat(service).headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * PROMPT - 3 * COMPLETION)


def test_tokens_of_a_failed_completion_are_charged(limited):
    service = limited(tokens_per_minute=1000)
    service.script = lambda request: [
        Update(request.id, (1, 2), "He"),
        Update(request.id, (3,), "", "error", error="x"),
    ]
    assert chat(service).status_code == 500
    assert chat(service).headers["x-ratelimit-remaining-tokens"] == str(1000 - PROMPT - 3)


async def test_tokens_after_a_disconnect_are_charged(limited):
    service = limited(tokens_per_minute=1000)
    callbacks, script, submit = [], service.script, service.submit
    service.submit = lambda request, on_update: (submit(request, on_update), callbacks.append(on_update))
    service.script = lambda request: None

    browser = Browser(create_app(service), "/v1/completions", {"prompt": "hi", "stream": True}, key=SECRET)
    await until(lambda: callbacks)
    browser.leave()
    await until(lambda: browser.task.done())
    callbacks[0](Update(service.submitted[0].id, (1, 2, 3, 4), "left", "cancelled"))
    await asyncio.sleep(0.01)
    service.script = script
    assert chat(service).headers["x-ratelimit-remaining-tokens"] == str(1000 - 3 - 4)


async def test_pending_charges_are_written_in_one_batch(monkeypatch):
    charged: list[tuple[str, int]] = []
    monkeypatch.setattr(Windows, "charge", lambda windows, name, tokens: charged.append((name, tokens)))
    budgets, key = Budgets(None), Key("a", (), frozenset(), limits=Limits(tokens_per_minute=9))
    for tokens in (2, 3):
        budgets.charge(key, tokens)
    await until(lambda: charged)
    budgets.close()
    assert charged == [("a", 5)]


def test_refused_request_is_not_charged(limited):
    service = limited(tokens_per_minute=1000)
    assert chat(service, max_tokens=10_000).status_code == 400
    assert chat(service).headers["x-ratelimit-remaining-tokens"] == "1000"
