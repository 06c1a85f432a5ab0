from __future__ import annotations

import pytest

from osd.engine.request import Update
from osd.metrics import SourceCounts, SpeculationCounts
from tests.unit.serving.answers import CHAT, error_of, events_of

COUNTS = SpeculationCounts(1, 3, 1, [1], [0, 1], {"recall": SourceCounts(2, 1), "eagle": SourceCounts(1, 0)})
TOKENS = [
    {"token": "a", "source": "target"},
    {"token": "\ufffd", "source": "recall"},
    {"token": "c", "source": "target"},
]
BODIES = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})]


@pytest.fixture
def crediting(service):
    """A service that says who its tokens come from, where it is asked; the second is no whole character."""

    def script(request):
        told = (("target", "recall"), ("target",)) if request.sources else ((), ())
        return [
            Update(request.id, (97, 0x24E), "a", sources=told[0]),
            Update(request.id, (99,), "c", "stop", COUNTS, sources=told[1]),
        ]

    service.script = script
    service.decode = lambda ids: "".join("\ufffd" if token == 0x24E else chr(token) for token in ids)
    return service


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_answer_says_who_each_token_comes_from_where_it_is_asked(client, crediting, path, body):
    answer = client.post(path, json={**body, "osd": {"sources": True}}).json()
    assert answer["choices"][0]["token_sources"] == TOKENS
    drafts = answer["metrics"]["speculative_decoding"]
    assert drafts["sources"] == {
        "recall": {"num_draft_tokens": 2, "num_accepted_draft_tokens": 1},
        "eagle": {"num_draft_tokens": 1, "num_accepted_draft_tokens": 0},
    }
    assert sum(one["source"] != "target" for one in TOKENS) == drafts["num_accepted_draft_tokens"]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_says_it_with_the_tokens(client, crediting, path, body):
    asked = {**body, "osd": {"sources": True}, "stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of(client.post(path, json=asked))
    assert [event["choices"][0]["token_sources"] for event in events] == [TOKENS[:2], TOKENS[2:]]
    assert set(last["metrics"]["speculative_decoding"]["sources"]) == {"recall", "eagle"}


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("osd", [None, {}, {"sources": False}, {"sources": None}])
def test_nothing_of_it_is_there_by_default(client, crediting, path, body, osd):
    answer = client.post(path, json={**body, "osd": osd}).json()
    assert not crediting.submitted[0].sources
    assert "token_sources" not in answer["choices"][0]
    assert "sources" not in answer["metrics"]["speculative_decoding"]


def test_what_is_no_boolean_is_refused(client):
    error = error_of(client.post("/v1/completions", json={"prompt": "hi", "osd": {"sources": 1}}), 400)
    assert error["param"] == "osd.sources"
