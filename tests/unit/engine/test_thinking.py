"""Phases of answers: draft counts, completion tokens and traces of thinking and of the answer after it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from osd.capture.trace import Trace, decode, encode
from osd.engine.request import TARGET, SamplingParams
from osd.engine.thinking import Thinking, ThinkingMarks
from tests.unit.engine.harness import prompts, running

MARKS = ThinkingMarks("<think>", "</think>")
SEGMENT = 16

ANSWERS = {
    "thinking and answer": (Thinking(MARKS), "<think>[a-z]{25}</think>[a-z]{20}", (7, 40)),
    "white space first": (Thinking(MARKS), " <think>[a-z]{12}</think>[a-z]{20}", (8, 28)),
    "begun in the prompt": (Thinking(MARKS, begun=True), "[a-z]{25}</think>[a-z]{20}", (0, 33)),
    "unclosed": (Thinking(MARKS), "<think>[a-z]{60}", (7, 60)),
    "first mark only": (Thinking(MARKS), "<think>", (7, 7)),
    "no thinking": (Thinking(MARKS), "[a-z]{30}</think>[a-z]{20}", (0, 0)),
    "no marks": (None, "<think>[a-z]{25}</think>[a-z]{20}", (0, 0)),
}
"""Forms of answers, and the first token in which a step counts as thinking, and the first token behind."""


@pytest.mark.parametrize("name", ANSWERS)
def test_counts_and_traces_are_divided_by_phase(target_dir: Path, name: str) -> None:
    thinking, regex, (first, end) = ANSWERS[name]
    traces: list[Trace] = []
    tokens, accepted = Counter[str](), Counter[str]()
    with running(target_dir, "language_model", traces=traces, segment=SEGMENT) as client:
        form = client.engine.grammars.compile("regex", regex)
        client.submit("r", prompts([9])[0], 60, SamplingParams(1.0, seed=3), grammar=form, thinking=thinking,
                      sources=True, capture=True)  # fmt: skip
        result = client.results["r"]
        while result.finish is None:
            phase = "thinking" if first <= len(result.tokens) < end else "answer"
            update = client.next()
            tokens[phase] += len(update.token_ids)
            accepted[phase] += sum(source != TARGET for source in update.sources)
        counts = client.settled()
    assert counts.phase_tokens == tokens
    assert result.last is not None
    assert result.last.thinking_tokens == min(end, len(result.tokens))
    assert {phase: drafts.accepted for phase, drafts in counts.by_phase.items()} == accepted
    assert set(counts.by_phase) == ({"thinking", "answer"} if first < end else {"answer"})
    assert first == end or accepted["thinking"]
    for name in ("rounds", "drafted", "accepted"):
        parts = [getattr(drafts, name) for drafts in counts.by_phase.values()]
        assert sum(parts) == getattr(counts.speculation(), name)
    starts = range(0, len(result.tokens), SEGMENT)
    expected = [min(max(end - start, 0), SEGMENT, len(result.tokens) - start) for start in starts]
    assert [decode(encode(trace)).thinking for trace in traces] == expected
