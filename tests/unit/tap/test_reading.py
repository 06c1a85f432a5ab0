"""Conversion of copied requests to exchanges."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("default", [True, False])
def test_only_store_true_is_consent(default: bool):
    settings = Settings(serving={"capture_default": default})  # type: ignore[arg-type]
    assert reason_of(copy(), settings) == reason_of(copy(store=None), settings) == ("" if default else "policy")
    assert reason_of(copy(store=True), settings) == ""
    for refused in (False, "false", "true", "", 0, 1, [], {}):
        assert reason_of(copy(store=refused), settings) == "policy", refused
