"""Log line of each request, which contains no text of the user."""

from __future__ import annotations

import json
import logging

import pytest

from osd.engine.request import Update
from osd.logs import JsonFormatter
from serving.api.routes import create_app
from tests.unit.serving.answers import asking, updates_of
from tests.unit.serving.browser import Browser, until

PROMPT, KEY = "unmistakable-prompt-4711", "sk-unmistakable-key-0815"


class Lines(logging.Handler):
    """Log handler that keeps the formatted lines."""

    def __init__(self):
        super().__init__()
        self.setFormatter(JsonFormatter("replica a"))
        self.text = []

    def emit(self, record):
        if not record.name.startswith("httpx"):  # lines of the test's client
            self.text.append(self.format(record))

    def requests(self):
        entries = [json.loads(line) for line in self.text]
        return [line for line in entries if line["event"] == "request"]


@pytest.fixture
def lines():
    """Lines of all loggers at every level."""
    handler, root, names = Lines(), logging.getLogger(), ("osd", "serving")
    root.addHandler(handler)
    levels = {name: logging.getLogger(name).level for name in ("", *names)}
    for name in levels:
        logging.getLogger(name or None).setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)


def post(service, path="/v1/completions", **body):
    body = {"prompt": PROMPT, **body} if "messages" not in body else body
    return asking(service).post(path, json=body, headers={"Authorization": f"Bearer {KEY}", "x-request-id": "r-1"})


@pytest.mark.parametrize("stream", [False, True])
def test_request_line_has_ids_tokens_times_and_drafts(service, lines, stream):
    service.script = updates_of
    response = post(service, n=2, stream=stream)
    assert response.status_code == 200
    (line,) = lines.requests()
    assert line["response_id"].startswith("cmpl-")
    assert line["response_id"] in response.text
    assert line.pop("seconds") > 0
    expected = {
        "method": "POST", "path": "/v1/completions", "status": 200, "request_id": "r-1", "key_name": None, "tenant": "",
        "sequences": 2, "finish_reasons": ["stop", "stop"], "prompt_tokens": 2 * (1 + len(PROMPT)), "cached_tokens": 8,
        "completion_tokens": 6, "queue_seconds": 2.0, "first_token_seconds": 3.5, "decode_seconds": 4.0, "rounds": 4,
        "drafted_tokens": 12, "accepted_tokens": 4, "domain": "code", "version": 7,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected


async def test_disconnected_request_is_logged_after_its_sequences_end(service, lines):
    service.script = lambda request: [Update(request.id, (1,), "a")]
    browser = Browser(create_app(service), "/v1/completions", {"prompt": PROMPT, "stream": True})
    await until(lambda: len(browser.sent) == 2)
    browser.leave()
    await until(lambda: browser.task.done())
    assert not lines.requests()
    service.updates[0](Update(service.submitted[0].id, (), "", "cancelled"))
    await until(lines.requests)
    (line,) = lines.requests()
    assert (line["finish_reasons"], line["completion_tokens"], line["status"]) == (["cancelled"], 1, 200)
    assert line["queue_seconds"] is None


def test_errors_are_logged_and_successful_reads_are_not(make_service, lines):
    client = asking(make_service(api_key="right"))
    assert client.get("/health").status_code == 200
    assert not lines.requests()
    assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 401
    assert client.get(f"/v1/{PROMPT}").status_code == 401
    first, second = lines.requests()
    assert (first["path"], first["status"]) == ("/v1/completions", 401)
    assert (second["path"], second["status"]) == ("(others)", 401)


BODIES = {
    "whole": {},
    "streamed": {"stream": True},
    "not a number": {"max_tokens": PROMPT},
    "an unknown field": {PROMPT: PROMPT},
    "an unknown model": {"model": PROMPT},
    "too long": {"prompt": PROMPT * 9},
    "a domain of its own": {"osd": {"domain": "unmistakable-prompt-4711"}},
    "a user": {"user": PROMPT, "stop": [PROMPT]},
    "a chat": {"messages": [{"role": "user", "content": PROMPT}]},
    "a chat that has no template": {"messages": [{"role": "assistant", "content": PROMPT}]},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_lines_contain_no_user_text_and_no_key(service, lines, body):
    service.script = updates_of
    post(service, "/v1/chat/completions" if "messages" in body else "/v1/completions", **body)
    post(service, f"/v1/{PROMPT}?{PROMPT}={KEY}")
    assert len(lines.requests()) == 2
    assert_silent(lines)


def test_failure_lines_contain_no_user_text(service, lines):
    service.encode = lambda text, special, limit: int(text)
    assert post(service).status_code == 500
    assert any('"exception":{"type":"ValueError"' in line for line in lines.text)
    assert_silent(lines)


def assert_silent(lines):
    for line in lines.text:
        assert PROMPT not in line
        assert KEY not in line
