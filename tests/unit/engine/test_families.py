"""Answers of models of many architectures, with and without drafts, alone and in a batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from docs.families import make_model
from osd.config import BestFirstSettings
from osd.drafting.recall.drafter import Recall
from tests.unit.engine.harness import Oracle, prompts, running, tokens_of

FEW = ["gemma2", "gpt2", "mixtral", "cohere2", "qwen3 with sliding windows"]
"""Architectures of different kinds: capped scores, learned positions, experts, no rotation, windows."""

PAGE = (Path(__file__).parents[3] / "docs/models.md").read_text()
SERVED = re.findall(r"^\| `([^`]+)` \| yes \|.* (yes|no) \|$", PAGE, re.MULTILINE)
"""Models that are served, and whether their rotary positions can be moved, as EAGLE needs it."""

CASES = [
    pytest.param(name, kind, marks=[] if name in FEW else pytest.mark.soak)
    for name, rotary in SERVED
    for kind in ("none", "recall", "eagle")
    if kind != "eagle" or rotary == "yes"
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_answers_of_each_architecture_match_transformers(name: str, kind: str, tmp_path: Path) -> None:
    directory = make_model(name, tmp_path)
    oracle, context = Oracle(directory), 64 if "longrope" in name else 128
    tokens, texts = min(64, context - 24), prompts((5, 24, 1), seed=3)
    goals = [oracle.greedy(prompt, tokens) for prompt in texts]
    drafts: dict[str, Any] = {"kind": kind}
    if kind == "recall":
        drafts = {"drafter": Recall(), "growth": BestFirstSettings(governed=False)}
    with running(directory, context=context, **drafts) as client:
        for prompt, goal in zip(texts, goals, strict=True):
            assert tokens_of(client.ask([prompt], tokens)) == [goal]
        answers = client.ask(texts, tokens)
    assert tokens_of(answers) == goals
    accepted = sum(answer.counts.accepted for answer in answers if answer.counts is not None)
    assert (accepted > 0) == (kind == "recall") or kind == "eagle"
