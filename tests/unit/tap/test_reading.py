"""Conversion of copied requests to exchanges."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx2
import pytest

from osd.config import Settings
from osd.tap.agreement import ServedTarget
from osd.tap.reading import Copy, NotCapturedError, exchanges_of

SERVED = ServedTarget(frozenset({"model"}))
ANSWER = {"id": "cmpl-1", "choices": [{"index": 0, "text": "so", "finish_reason": "stop"}]}


def copy(**fields: Any) -> Copy:
    """Return the copy of a complete text completion."""
    captured = Copy(chat=False, limit=10_000)
    captured.request(json.dumps({"model": "model", "prompt": "Is it?", **fields}).encode())
    captured.begin((), 200, httpx2.Headers({"content-type": "application/json"}))
    captured.answer(json.dumps(ANSWER).encode())
    captured.complete = True
    return captured


def reason_of(captured: Copy, settings: Settings) -> str:
    """Return the reason why an answer is not captured, or "" if it is captured."""
    try:
        assert [exchange.request_id for exchange in exchanges_of(captured, settings, SERVED)] == ["cmpl-1-0"]
    except NotCapturedError as error:
        return error.reason
    return ""


def packed(data: bytes, encoding: str, **fields: Any) -> Copy:
    captured = copy(**fields)
    captured.headers["content-encoding"] = encoding
    captured.answer_body[:] = data
    return captured


def test_packed_answer_is_unpacked_up_to_the_limit_of_a_copy():
    data, settings = json.dumps(ANSWER).encode(), Settings()
    for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        assert reason_of(packed(pack(data), encoding), settings) == ""
        assert reason_of(packed(pack(data)[:-9], encoding), settings) == "unreadable"
        assert reason_of(packed(data, encoding), settings) == "unreadable"
        bomb = pack(data + b" " * 4_000_000)
        assert len(bomb) < 10_000
        assert reason_of(packed(bomb, encoding), settings) == "size"
    assert reason_of(packed(data, "identity"), settings) == ""
    assert reason_of(packed(data, "br"), settings) == "unreadable"


def test_deep_json_is_not_captured():
    settings, deep = Settings(), "[" * 600 + "]" * 600
    assert reason_of(copy(x=json.loads("[" * 90 + "]" * 90)), settings) == ""
    bad_request, bad_answer = copy(), copy()
    bad_request.request_body[:] = b'{"model": "model", "prompt": "a", "x": %s}' % deep.encode()
    bad_answer.answer_body[:] = b'{"id": "cmpl-1", "x": %s}' % deep.encode()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    chat = copy(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])
    chat.chat = True
    for captured in (bad_request, bad_answer, chat):
        assert reason_of(captured, settings) == "unreadable"


@pytest.mark.parametrize("default", [True, False])
def test_only_store_true_is_consent(default: bool):
    settings = Settings(serving={"capture_default": default})  # type: ignore[arg-type]
    assert reason_of(copy(), settings) == reason_of(copy(store=None), settings) == ("" if default else "policy")
    assert reason_of(copy(store=True), settings) == ""
    for refused in (False, "false", "true", "", 0, 1, [], {}):
        assert reason_of(copy(store=refused), settings) == "policy", refused
