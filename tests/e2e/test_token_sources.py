"""Sources of tokens over HTTP."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.conftest import Service


@pytest.mark.soak
def test_token_sources_add_up_to_the_counts(service: Service) -> None:
    seen: Counter[str] = Counter()
    for number in range(100):
        fields = {"temperature": number % 3, "seed": number // 3} if number % 2 else {"temperature": number % 3}
        answer = service.complete(f"hello {number % 10}", max_tokens=40, osd={"sources": True}, **fields).json()
        sources = Counter(token["source"] for token in answer["choices"][0]["token_sources"])
        drafts = answer["metrics"]["speculative_decoding"]
        assert sources.total() == answer["usage"]["completion_tokens"]
        assert sources.total() - sources["target"] == drafts["num_accepted_draft_tokens"]
        for source, counts in drafts["sources"].items():
            assert sources[source] == counts["num_accepted_draft_tokens"]
        seen += sources
    print(f"tokens of 100 answers by source: {dict(seen)}")
    assert len(seen) > 1
