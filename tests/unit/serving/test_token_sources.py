from __future__ import annotations

import pytest

from osd.engine.request import Update
from osd.metrics import SourceCounts, SpeculationCounts
from osd.target.vocabulary import TokenText
from tests.unit.serving.answers import CHAT, error_of, events_of

COUNTS = SpeculationCounts(1, 3, 1, [1], [0, 1], {"recall": SourceCounts(2, 1), "eagle": SourceCounts(1, 0)})
TOKENS = [
    {"token": "a", "source": "target"},
    {"token": "\ufffd", "source": "recall"},
    {"token": "c", "source": "target"},
]
BODIES = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})]


@pytest.fixture
def reporting_service(service):
    """Service that reports token sources on request; its second token is part of a character."""

    def script(request):
        sources = (("target", "recall"), ("target",)) if request.sources else ((), ())
        return [
            Update(request.id, (97, 0x24E), "a", sources=sources[0]),
            Update(request.id, (99,), "c", "stop", COUNTS, sources=sources[1]),
        ]

    service.script = script
    service.token_texts = lambda ids: [TokenText(b"\xf0\x9f" if i == 0x24E else bytes([i]), False) for i in ids]
    return service


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_response_reports_token_sources_on_request(client, reporting_service, path, body):
    answer = client.post(path, json={**body, "osd": {"sources": True}}).json()
    assert answer["choices"][0]["token_sources"] == TOKENS
    drafts = answer["metrics"]["speculative_decoding"]
    assert drafts["sources"] == {
        "recall": {"num_draft_tokens": 2, "num_accepted_draft_tokens": 1},
        "eagle": {"num_draft_tokens": 1, "num_accepted_draft_tokens": 0},
    }
    assert sum(token["source"] != "target" for token in TOKENS) == drafts["num_accepted_draft_tokens"]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_stream_reports_token_sources_with_the_tokens(client, reporting_service, path, body):
    streamed = {**body, "osd": {"sources": True}, "stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of(client.post(path, json=streamed))
    assert [event["choices"][0]["token_sources"] for event in events] == [TOKENS[:2], TOKENS[2:]]
    assert set(last["metrics"]["speculative_decoding"]["sources"]) == {"recall", "eagle"}


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("osd", [None, {}, {"sources": False}, {"sources": None}])
def test_token_sources_are_absent_by_default(client, reporting_service, path, body, osd):
    answer = client.post(path, json={**body, "osd": osd}).json()
    assert not reporting_service.submitted[0].sources
    assert "token_sources" not in answer["choices"][0]
    assert "sources" not in answer["metrics"]["speculative_decoding"]


def test_sources_must_be_a_boolean(client):
    error = error_of(client.post("/v1/completions", json={"prompt": "hi", "osd": {"sources": 1}}), 400)
    assert error["param"] == "osd.sources"
