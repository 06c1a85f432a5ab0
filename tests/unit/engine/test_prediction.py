"""Predicted outputs: recall copies drafts from a prediction, and the answer does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osd.config import BestFirstSettings
from osd.drafting.recall.drafter import Recall
from osd.engine.request import SamplingParams
from tests.unit.engine.harness import Oracle, Result, prompts, running

TOKENS = 90
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=2.0)  # a tiny model would repeat itself
DRAWN = SamplingParams(temperature=1.5, top_p=0.95, seed=3, repeatable=True)


def answers(directory: Path, prompt: list[int], *requests: dict[str, Any]) -> list[Result]:
    """Return the answers to a prompt, each of a new engine."""
    results: list[Result] = []
    for more in requests:
        with running(directory, drafter=Recall(), growth=BestFirstSettings(governed=False), context=256) as client:
            client.submit("one", prompt, TOKENS, ignore_eos=True, **more)
            results.append(client.wait()["one"])
    return results


def accepted(result: Result) -> int:
    assert result.counts is not None
    return result.counts.accepted


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_right_prediction_is_drafted_and_changes_no_token(target_dir: Path, sampling: SamplingParams) -> None:
    prompt = prompts([20], seed=8)[0]
    (plain,) = answers(target_dir, prompt, {"sampling": sampling})
    (predicted,) = answers(target_dir, prompt, {"sampling": sampling, "prediction": tuple(plain.tokens)})
    assert predicted.tokens == plain.tokens
    assert accepted(predicted) > accepted(plain) + TOKENS // 2


def test_prediction_with_changed_places_is_drafted_around_them(target_dir: Path) -> None:
    prompt = prompts([20], seed=8)[0]
    (plain,) = answers(target_dir, prompt, {"sampling": GREEDY})
    changed = tuple((token + 1) % 200 if place % 30 == 15 else token for place, token in enumerate(plain.tokens))
    (predicted,) = answers(target_dir, prompt, {"sampling": GREEDY, "prediction": changed})
    assert predicted.tokens == plain.tokens
    assert accepted(predicted) > accepted(plain) + TOKENS // 3


def test_wrong_or_overlong_prediction_changes_no_token(target_dir: Path, oracle: Oracle) -> None:
    prompt = prompts([20], seed=8)[0]
    goal = oracle.greedy(prompt, TOKENS)
    wrong, longer = tuple(prompts([200], seed=9)[0]), tuple(prompts([700], seed=9)[0])
    assert [result.tokens for result in answers(target_dir, prompt, {"prediction": wrong}, {"prediction": longer})] == [
        goal,
        goal,
    ]


def test_prediction_is_forgotten_with_its_request(target_dir: Path) -> None:
    prompt = prompts([20], seed=8)[0]
    (plain,) = answers(target_dir, prompt, {"sampling": GREEDY})
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False), context=256) as client:
        client.submit("first", prompt, 1, GREEDY, ignore_eos=True, prediction=tuple(plain.tokens))
        client.wait()
        client.submit("second", prompt, TOKENS, GREEDY, ignore_eos=True)
        second = client.wait()["second"]
    assert second.tokens == plain.tokens
    assert accepted(second) < TOKENS // 4
