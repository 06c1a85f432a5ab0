"""Which requests a tap may keep, and what it reads out of them."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from osd.config import Settings
from osd.tap.agreement import Served
from osd.tap.reading import Copy, PassedOver, exchanges_of

SERVED = Served(frozenset({"model"}))
ANSWER = {"id": "cmpl-1", "choices": [{"index": 0, "text": "so", "finish_reason": "stop"}]}


def copy(**asked: Any) -> Copy:
    """A whole text completion and its answer."""
    made = Copy(chat=False, limit=10_000)
    made.request(json.dumps({"model": "model", "prompt": "Is it?", **asked}).encode())
    made.begin((), 200, httpx2.Headers({"content-type": "application/json"}))
    made.answer(json.dumps(ANSWER).encode())
    made.whole = True
    return made


def reason_of(made: Copy, settings: Settings) -> str:
    """Why an answer is not kept, "" where it is."""
    try:
        assert [one.request_id for one in exchanges_of(made, settings, SERVED)] == ["cmpl-1-0"]
    except PassedOver as error:
        return error.reason
    return ""


@pytest.mark.parametrize("default", [True, False])
def test_store_is_consent_only_as_the_json_value_true(default: bool):
    settings = Settings(serving={"capture_default": default})  # type: ignore[arg-type]
    assert reason_of(copy(), settings) == reason_of(copy(store=None), settings) == ("" if default else "policy")
    assert reason_of(copy(store=True), settings) == ""
    for refused in (False, "false", "true", "", 0, 1, [], {}):
        assert reason_of(copy(store=refused), settings) == "policy", refused
