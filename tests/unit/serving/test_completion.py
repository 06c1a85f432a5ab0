"""Requests that end where they are judged to go wrong: what is taken, what is refused, and what is answered."""

from __future__ import annotations

import pytest

from osd.config import EarlyExitSettings, MixedSettings
from osd.engine.completion import Completing, Judged, Skipped
from osd.engine.request import Update
from osd.metrics import SpeculationCounts
from tests.unit.serving.answers import CHAT, error_of

STOP = {"completion": {"stop": 0.9}}
PROMPT = {"prompt": "hi", "osd": STOP}


@pytest.fixture
def judging(service):
    changed = MixedSettings(trained=EarlyExitSettings())
    service.settings = service.settings.model_copy(update={"drafter": changed})
    return service


def test_the_threshold_reaches_the_engine_and_the_reason_the_client(client, judging):
    judging.script = lambda request: [
        Update(request.id, (1,), "a", "stop", SpeculationCounts(), judged=Judged(3, 0.98765))
        if request.id.endswith("-1")
        else Update(request.id, (1,), "a", "length", SpeculationCounts(), judged=Judged(4))
    ]
    body = client.post("/v1/completions", json={**PROMPT, "n": 2}).json()
    assert [request.completing for request in judging.submitted] == [Completing(0.9)] * 2
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    assert body["metrics"]["completion"] == {
        "judged_tokens": 7,
        "stopped": [{"index": 1, "reason": "judged_wrong", "probability": 0.9877}],
    }


def test_the_threshold_of_exits_reaches_the_engine_with_a_form_and_without(client, judging):
    osd = {"completion": {"exit": 0.7}}
    client.post("/v1/completions", json={"prompt": "hi", "osd": osd})
    client.post("/v1/completions", json={"prompt": "hi", "osd": osd, "response_format": {"type": "json_object"}})
    assert [request.completing for request in judging.submitted] == [Completing(None, 0.7)] * 2


LOSSY = {"completion": {"exit": 0.7, "lossy": True}}


@pytest.fixture
def lossy(judging):
    allowed = judging.settings.serving.model_copy(update={"allow_lossy": True})
    judging.settings = judging.settings.model_copy(update={"serving": allowed})
    return judging


def test_a_lossy_answer_is_asked_for_and_says_what_did_not_run_for_it(client, lossy):
    lossy.script = lambda request: [
        Update(request.id, (1,), "a", "length", SpeculationCounts(), skipped=Skipped(4, 30)),
    ]
    body = client.post("/v1/completions", json={"prompt": "hi", "osd": LOSSY, "n": 2}).json()
    assert [request.completing for request in lossy.submitted] == [Completing(None, 0.7, lossy=True)] * 2
    assert not any(request.teaches for request in lossy.submitted)
    assert body["metrics"]["completion"] == {"layers": 60, "skipped_layers": 8}


def test_stops_and_lossy_exits_may_be_asked_for_together(client, lossy):
    lossy.script = lambda request: [
        Update(request.id, (1,), "a", "length", SpeculationCounts(), judged=Judged(2), skipped=Skipped(0, 30)),
    ]
    osd = {"completion": {"exit": 0, "lossy": True, "stop": 0.9}}
    body = client.post("/v1/chat/completions", json={**CHAT, "osd": osd}).json()
    assert lossy.submitted[0].completing == Completing(0.9, 0.0, lossy=True)
    assert body["metrics"]["completion"] == {"judged_tokens": 2, "stopped": [], "layers": 30, "skipped_layers": 0}


def test_an_answer_is_the_models_own_where_lossy_is_false(client, judging):
    osd = {"completion": {"exit": 0.7, "lossy": False}}
    assert client.post("/v1/completions", json={"prompt": "hi", "osd": osd}).status_code == 200
    assert judging.submitted[0].completing == Completing(None, 0.7)


def test_a_lossy_answer_is_refused_where_the_server_does_not_allow_it(client, judging):
    error = error_of(client.post("/v1/completions", json={"prompt": "hi", "osd": LOSSY}), 400)
    assert error["param"] == "osd.completion.lossy"
    assert "needs serving.allow_lossy, which is false here" in error["message"]
    assert not judging.submitted


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"osd": {"completion": {"lossy": True}}}, "osd.completion.lossy", "without 'osd.completion.exit'"),
        ({"osd": {"completion": {"lossy": True, "stop": 0.5}}}, "osd.completion.lossy", "without"),
        ({"osd": {**LOSSY, "speculate": False}}, "osd.completion.exit", "'osd.speculate' is false"),
        ({"osd": {**LOSSY, "growth": {"kind": "chain"}}}, "osd.growth", "'osd.completion.lossy'"),
        ({"osd": {**LOSSY, "verification": "naive"}}, "osd.verification", "'osd.completion.lossy'"),
        ({"response_format": {"type": "json_object"}}, "osd.completion.lossy", "form of the answer"),
        ({"store": True}, "store", "nobody learns"),
    ],
)
def test_what_a_lossy_answer_cannot_have_is_refused_by_name(client, lossy, more, param, said):
    error = error_of(client.post("/v1/completions", json={"prompt": "hi", "osd": LOSSY, **more}), 400)
    assert error["param"] == param
    assert said in error["message"]
    assert not lossy.submitted


def test_it_is_off_unless_a_request_asks(client, judging):
    body = client.post("/v1/completions", json={"prompt": "hi"}).json()
    assert judging.submitted[0].completing is None
    assert "completion" not in body["metrics"]


def test_prompts_of_text_completions_are_real_text_and_those_of_chats_are_not(client, service):
    client.post("/v1/completions", json={"prompt": "hi"})
    client.post("/v1/chat/completions", json=CHAT)
    assert [request.completes for request in service.submitted] == [True, False]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({**PROMPT, "osd": {"completion": {"stop": 1.5}}}, "less than or equal to 1"),
        ({**PROMPT, "osd": {"completion": {"stop": -0.1}}}, "greater than or equal to 0"),
        ({**PROMPT, "osd": {"completion": {"stop": "high"}}}, "number"),
        ({**PROMPT, "osd": {"completion": {"stop": 0.5, "exit": 0.5}, "speculate": False}}, "'osd.speculate' is false"),
        ({**PROMPT, "osd": {**STOP, "speculate": False}}, "'osd.speculate' is false"),
        ({**PROMPT, "response_format": {"type": "json_object"}}, "form of the answer"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, judging, body, said):
    error = error_of(client.post("/v1/completions", json=body), 400)
    assert error["param"] == "osd.completion.stop"
    assert said in error["message"]
    assert not judging.submitted


@pytest.mark.parametrize(("name", "more"), [("stop", {}), ("exit", {}), ("exit", {"lossy": True})])
def test_a_service_whose_drafter_cannot_judge_refuses(client, service, name, more):
    error = error_of(client.post("/v1/completions", json={**PROMPT, "osd": {"completion": {name: 0.5, **more}}}), 400)
    assert error["param"] == f"osd.completion.{name}"
    assert "early_exit" in error["message"]
    assert not service.submitted
