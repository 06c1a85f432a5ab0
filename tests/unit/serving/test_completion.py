"""Requests with a controller: stops, early exits and lossy answers."""

from __future__ import annotations

import pytest

from osd.config import EarlyExitSettings, MixedSettings
from osd.engine.completion import ControllerOptions, JudgedTokens, SkippedLayers
from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from tests.unit.serving.answers import CHAT, refusal_of

STOP = {"completion": {"stop": 0.9}}
PROMPT = {"prompt": "hi", "osd": STOP}


@pytest.fixture
def controlled_service(service):
    changed = MixedSettings(trained=EarlyExitSettings())
    service.settings = service.settings.model_copy(update={"drafter": changed})
    return service


def test_stop_threshold_reaches_the_engine_and_is_reported(client, controlled_service):
    controlled_service.script = lambda request: [
        Update(request.id, (1,), "a", "stop", SpeculationCounts(), judged=JudgedTokens(3, 0.98765))
        if request.id.endswith("-1")
        else Update(request.id, (1,), "a", "length", SpeculationCounts(), judged=JudgedTokens(4))
    ]
    body = client.post("/v1/completions", json={**PROMPT, "n": 2}).json()
    assert [request.controller for request in controlled_service.submitted] == [ControllerOptions(0.9)] * 2
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    assert body["metrics"]["completion"] == {
        "judged_tokens": 7,
        "stopped": [{"index": 1, "reason": "judged_wrong", "probability": 0.9877}],
    }


@pytest.mark.parametrize("more", [{}, {"lossy": False}])
def test_exit_threshold_reaches_the_engine_with_any_format(client, controlled_service, more):
    osd = {"completion": {"exit": 0.7, **more}}
    client.post("/v1/completions", json={"prompt": "hi", "osd": osd})
    client.post("/v1/completions", json={"prompt": "hi", "osd": osd, "response_format": {"type": "json_object"}})
    assert [request.controller for request in controlled_service.submitted] == [ControllerOptions(None, 0.7)] * 2


LOSSY = {"completion": {"exit": 0.7, "lossy": True}}


@pytest.fixture
def lossy_service(controlled_service):
    allowed = controlled_service.settings.serving.model_copy(update={"allow_lossy": True})
    controlled_service.settings = controlled_service.settings.model_copy(update={"serving": allowed})
    return controlled_service


def test_lossy_answer_reports_skipped_layers(client, lossy_service):
    lossy_service.script = lambda request: [
        Update(request.id, (1,), "a", "length", SpeculationCounts(), skipped=SkippedLayers(4, 30))
    ]
    body = client.post("/v1/completions", json={"prompt": "hi", "osd": LOSSY, "n": 2}).json()
    assert [request.controller for request in lossy_service.submitted] == [ControllerOptions(None, 0.7, lossy=True)] * 2
    assert not any(request.teaches for request in lossy_service.submitted)
    assert body["metrics"]["completion"] == {"layers": 60, "skipped_layers": 8}


def test_stop_and_lossy_exit_can_be_combined(client, lossy_service):
    lossy_service.script = lambda request: [
        Update(
            request.id, (1,), "a", "length", SpeculationCounts(), judged=JudgedTokens(2), skipped=SkippedLayers(0, 30)
        )
    ]
    osd = {"completion": {"exit": 0, "lossy": True, "stop": 0.9}}
    body = client.post("/v1/chat/completions", json={**CHAT, "osd": osd}).json()
    assert lossy_service.submitted[0].controller == ControllerOptions(0.9, 0.0, lossy=True)
    assert body["metrics"]["completion"] == {"judged_tokens": 2, "stopped": [], "layers": 30, "skipped_layers": 0}


def test_lossy_answer_is_400_unless_the_server_allows_it(client, controlled_service):
    answer = client.post("/v1/completions", json={"prompt": "hi", "osd": LOSSY})
    refusal_of(answer, "osd.completion.lossy", "needs serving.allow_lossy, which is false here")
    assert not controlled_service.submitted


@pytest.mark.parametrize(("more", "param", "reason"), [
    ({"osd": {"completion": {"lossy": True}}}, "osd.completion.lossy", "without 'osd.completion.exit'"),
    ({"osd": {"completion": {"lossy": True, "stop": 0.5}}}, "osd.completion.lossy", "without"),
    ({"osd": {**LOSSY, "speculate": False}}, "osd.completion.exit", "'osd.speculate' is false"),
    ({"osd": {**LOSSY, "growth": {"kind": "chain"}}}, "osd.growth", "'osd.completion.lossy'"),
    ({"osd": {**LOSSY, "verification": "naive"}}, "osd.verification", "'osd.completion.lossy'"),
    ({"response_format": {"type": "json_object"}}, "osd.completion.lossy", "form of the answer"),
    ({"store": True}, "store", "lossy answers are not learned"),
])  # fmt: skip
def test_fields_incompatible_with_lossy_are_400(client, lossy_service, more, param, reason):
    refusal_of(client.post("/v1/completions", json={"prompt": "hi", "osd": LOSSY, **more}), param, reason)
    assert not lossy_service.submitted


def test_only_text_completion_prompts_are_completed_text(client, service):
    body = client.post("/v1/completions", json={"prompt": "hi"}).json()
    client.post("/v1/chat/completions", json=CHAT)
    assert [request.completes for request in service.submitted] == [True, False]
    assert service.submitted[0].controller is None
    assert "completion" not in body["metrics"], "control of completions is off by default"


@pytest.mark.parametrize(("body", "reason"), [
    ({**PROMPT, "osd": {"completion": {"stop": 1.5}}}, "less than or equal to 1"),
    ({**PROMPT, "osd": {"completion": {"stop": -0.1}}}, "greater than or equal to 0"),
    ({**PROMPT, "osd": {"completion": {"stop": "high"}}}, "number"),
    ({**PROMPT, "osd": {"completion": {"stop": 0.5, "exit": 0.5}, "speculate": False}}, "'osd.speculate' is false"),
    ({**PROMPT, "osd": {**STOP, "speculate": False}}, "'osd.speculate' is false"),
    ({**PROMPT, "response_format": {"type": "json_object"}}, "form of the answer"),
])  # fmt: skip
def test_invalid_stop_threshold_is_400(client, controlled_service, body, reason):
    refusal_of(client.post("/v1/completions", json=body), "osd.completion.stop", reason)
    assert not controlled_service.submitted


@pytest.mark.parametrize(("name", "more"), [("stop", {}), ("exit", {}), ("exit", {"lossy": True})])
def test_completion_control_without_a_controller_is_400(client, service, name, more):
    answer = client.post("/v1/completions", json={**PROMPT, "osd": {"completion": {name: 0.5, **more}}})
    refusal_of(answer, f"osd.completion.{name}", "early_exit")
    assert not service.submitted
