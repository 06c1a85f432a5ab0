"""Measurement of the speed-up by blocks of steps without drafts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from osd.economy.effect import Step
from osd.economy.switchback import Switchback
from osd.engine.planner import Planner
from osd.engine.step import StepOutcome
from tests.unit.engine.harness import prompts, running, tokens_of, weights_of

LENGTHS, TOKENS = (5, 9, 12), 100


def test_plain_blocks_have_no_drafts_or_upkeep(target_dir: Path, monkeypatch: pytest.MonkeyPatch):
    steps: list[tuple[bool, StepOutcome, float, Step]] = []
    plan, observe = Planner.observe, Switchback.observe
    latest: list[tuple[StepOutcome, float]] = []

    def planned(self: Planner, outcome: StepOutcome, seconds: float) -> None:
        latest.append((outcome, seconds))
        plan(self, outcome, seconds)

    def observed(self: Switchback, step: Step) -> None:
        steps.append((self.drafts, *latest[-1], step))
        observe(self, step)

    monkeypatch.setattr(Planner, "observe", planned)
    monkeypatch.setattr(Switchback, "observe", observed)
    with running(target_dir, "eagle", governed=True, measure=0.005) as client:
        client.ask(prompts(LENGTHS), TOKENS)
        client.ask(prompts(LENGTHS), TOKENS, "again-{}")
    arms = Counter(drafts for drafts, *_ in steps)
    assert min(arms[True], arms[False]) > 50
    for drafts, outcome, seconds, step in steps:
        assert step.streams == len(outcome.sequences)
        assert step.tokens == sum(result.tokens for result in outcome.sequences)
        assert step.prompt_rows == outcome.plain_rows - step.streams
        if not drafts:
            assert not outcome.draft_seconds
            assert step.tokens == step.streams
        upkeep = 0.0 if drafts else sum(outcome.upkeep_seconds.values())
        assert step.seconds == pytest.approx(seconds - upkeep)


def test_disabled_speculation_is_not_measured(target_dir: Path):
    with running(target_dir, "eagle", governed=True, measure=0.005) as client:
        client.engine.set_speculation(False)
        for turn in range(4):
            client.ask(prompts(LENGTHS), TOKENS, f"{turn}-{{}}")
        switchback = client.engine.loop.planner.switchback
        assert switchback is not None
        assert switchback.busy == 0


def test_measuring_keeps_answers_and_its_trials_across_a_swap(target_dir: Path):
    with running(target_dir) as client:
        goals = tokens_of(client.ask(prompts(LENGTHS), TOKENS))
    with running(target_dir, "eagle", governed=True, measure=0.005) as client:
        for turn in range(8):
            assert tokens_of(client.ask(prompts(LENGTHS), TOKENS, f"{turn}-{{}}")) == goals
        before, switchback = client.engine.measured, client.engine.loop.planner.switchback
        assert before.trials >= 2
        assert before.drafted > 0
        assert before.effect is not None
        budget = switchback.budget
        client.engine.stage(2, weights_of("eagle", target_dir, 1.0))
        client.swapped_to(2)
        assert client.engine.measured.trials >= before.trials
        assert switchback.budget is not budget
