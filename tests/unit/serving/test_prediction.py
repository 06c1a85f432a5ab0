"""Predicted outputs in chat completions."""

from __future__ import annotations

import pytest

from osd.config import EagleSettings
from osd.engine.request import Update
from osd.metrics import SourceCounts, SpeculationCounts
from tests.unit.serving.answers import CHAT, error_of, events_of, refusal_of

COUNTS = SpeculationCounts(
    4, 9, 5, [5], [0, 1], {"recall": SourceCounts(2, 1), "copy": SourceCounts(5, 3), "request": SourceCounts(2, 1)}
)
DETAILS = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}


def predicted(content):
    return {**CHAT, "prediction": {"type": "content", "content": content}}


@pytest.fixture
def drafting(service):
    service.script = lambda request: [Update(request.id, (97,), "a", "stop", COUNTS)]
    return service


@pytest.mark.parametrize("content", ["file", [{"type": "text", "text": "fi"}, {"type": "text", "text": "le"}]])
def test_prediction_reaches_the_engine_and_the_usage(client, drafting, content):
    body = client.post("/v1/chat/completions", json=predicted(content)).json()
    assert drafting.submitted[0].prediction == tuple(map(ord, "file"))
    assert body["usage"]["completion_tokens_details"] == DETAILS


def test_stream_reports_the_prediction_in_its_usage(client, drafting):
    body = {**predicted("file"), "stream": True, "stream_options": {"include_usage": True}}
    *_, last = events_of(client.post("/v1/chat/completions", json=body))
    assert last["usage"]["completion_tokens_details"] == DETAILS


def test_usage_without_prediction_has_no_details(client, drafting):
    assert "completion_tokens_details" not in client.post("/v1/chat/completions", json=CHAT).json()["usage"]


@pytest.mark.parametrize(("fields", "param", "why"), [
    ({"prediction": {"type": "content", "content": "x" * 5000}}, "prediction", "has 5000 tokens and the limit is"),
    ({"prediction": {"type": "content"}}, "prediction.content", "required"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "content"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content", "only text"),
    ({**predicted("x"), "osd": {"speculate": False}}, "prediction", "osd.speculate"),
])  # fmt: skip
def test_prediction_that_cannot_be_used_is_refused(client, service, fields, param, why):
    refusal_of(client.post("/v1/chat/completions", json={**CHAT, **fields}), param, why)
    assert not service.submitted


def test_prediction_needs_recall(client, service):
    service.settings = service.settings.model_copy(update={"drafter": EagleSettings()})
    error = error_of(client.post("/v1/chat/completions", json=predicted("x")), 400)
    assert "drafts without recall" in error["message"]
