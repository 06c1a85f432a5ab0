from __future__ import annotations

import pytest

from osd.engine.request import TokenLogprobs, Update
from osd.metrics import SpeculationCounts
from osd.target.vocabulary import TokenText
from tests.unit.serving.answers import CHAT, events_of


def with_logprobs(request):
    """Return three tokens in three updates; token 2 is part of a character and token 3 has probability 0."""
    places = [
        TokenLogprobs(97, -0.5, ((97, -0.5), (98, -1.5))),
        TokenLogprobs(0x24E, -3.0, ((98, -0.1), (99, -2.0))),
        TokenLogprobs(99, float("-inf"), ((97, -0.25), (98, -2.5))),
    ]
    places = [TokenLogprobs(p.token, p.logprob, p.top[: request.logprobs]) for p in places]
    return [
        Update(request.id, (97, 0x24E), "a", logprobs=tuple(places[:2])),
        Update(request.id, (), ""),
        Update(request.id, (99,), "c", "stop", SpeculationCounts(), logprobs=tuple(places[2:])),
    ]


@pytest.fixture
def reporting_service(service):
    """Service that reports log-probabilities and has a token that is part of a character."""
    service.script = with_logprobs
    service.token_texts = lambda ids: [TokenText(b"\xf0\x9f" if i == 0x24E else bytes([i]), False) for i in ids]
    return service


def chat_entry(text, logprob, encoded):
    return {"token": text, "logprob": logprob, "bytes": encoded}


CHAT_LOGPROBS = [
    {**chat_entry("a", -0.5, [97]), "top_logprobs": [chat_entry("a", -0.5, [97]), chat_entry("b", -1.5, [98])]},
    {
        **chat_entry("\ufffd", -3.0, [0xF0, 0x9F]),
        "top_logprobs": [chat_entry("b", -0.1, [98]), chat_entry("c", -2.0, [99])],
    },
    {**chat_entry("c", -9999.0, [99]), "top_logprobs": [chat_entry("a", -0.25, [97]), chat_entry("b", -2.5, [98])]},
]


def test_chat_reports_logprobs_in_openai_format(client, reporting_service):
    fields = {**CHAT, "logprobs": True, "top_logprobs": 2}
    (choice,) = client.post("/v1/chat/completions", json=fields).json()["choices"]
    assert reporting_service.submitted[0].logprobs == 2
    assert choice["logprobs"] == {"content": CHAT_LOGPROBS, "refusal": None}


def test_chat_stream_reports_logprobs_with_each_event(client, reporting_service):
    fields = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": True}
    events = events_of(client.post("/v1/chat/completions", json=fields))
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert parts == [
        {"content": CHAT_LOGPROBS[:2], "refusal": None},
        None,
        {"content": CHAT_LOGPROBS[2:], "refusal": None},
    ]


def test_completion_reports_logprobs_and_text_offsets(client, reporting_service):
    body = client.post("/v1/completions", json={"prompt": ["x", "y"], "logprobs": 1}).json()
    for choice in body["choices"]:
        assert choice["logprobs"] == {
            "tokens": ["a", "\ufffd", "c"],
            "token_logprobs": [-0.5, -3.0, -9999.0],
            "top_logprobs": [{"a": -0.5}, {"\ufffd": -3.0, "b": -0.1}, {"c": -9999.0, "a": -0.25}],
            "text_offset": [0, 1, 1],
        }


def test_completion_stream_continues_text_offsets(client, reporting_service):
    events = events_of(client.post("/v1/completions", json={"prompt": "x", "logprobs": 0, "stream": True}))
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [part and part["text_offset"] for part in parts] == [[0, 1], None, [1]]
    assert parts[0]["top_logprobs"] == [{"a": -0.5}, {"\ufffd": -3.0}]
