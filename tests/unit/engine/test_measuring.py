"""Measurement of the speed-up by blocks of steps without drafts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from osd.drafting.mixed import Mixed
from osd.drafting.session import Tree
from osd.economy.costs import CostModel
from osd.economy.effect import Step
from osd.economy.switchback import Switchback
from osd.engine.completion import ControllerOptions
from osd.engine.planner import Planner, measured_step
from osd.engine.step import SequenceOutcome, StepOutcome
from osd.recall.memory import BEHIND
from tests.tiny import make_tiny
from tests.unit.engine.harness import make_drafter, prompts, running, tokens_of, weights_of
from tests.unit.engine.test_completion import judging_drafter

LENGTHS, TOKENS = (5, 9, 12), 100


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target with layers that an answer can leave early."""
    return make_tiny(tmp_path_factory.mktemp("deep"), layers=8)


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
    monkeypatch.setattr(CostModel, "without_outlier", lambda costs, seconds, rows, drafting: seconds)
    with running(target_dir, "eagle", governed=True, measure=0.005) as client:
        for turn in range(4):
            client.ask(prompts(LENGTHS), TOKENS, f"{turn}-{{}}")
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


@pytest.mark.parametrize(("sources", "path", "tokens", "forced"), [
    (["eagle", "eagle"], [0, 1], 3, 0), (["grammar", "grammar", "eagle"], [0, 1, 2], 4, 2),
    (["recall", BEHIND, BEHIND, "recall"], [0, 1, 2], 4, 2), (["grammar", "grammar"], [0, 1], 1, 1),
], ids=["free", "forced first", "forced behind", "stop string"])  # fmt: skip
def test_forced_tokens_count_as_prompt_rows(sources: list[str], path: list[int], tokens: int, forced: int):
    tree = Tree([5] * len(sources), [*range(-1, len(sources) - 1)], sources)
    s: Any = None
    outcome = StepOutcome([SequenceOutcome(s, tokens, tree, path)], {}, {}, 5, 1, {}, {}, 0.1, False, drafts=True)
    step = measured_step(outcome, 0.2, CostModel())
    assert (step.streams, step.prompt_rows, step.tokens) == (1, forced, max(tokens - forced, 1))
    assert step.seconds == 0.2
    assert measured_step(outcome, 0.2, CostModel({1: 0.01})).seconds == pytest.approx(0.03)


def test_lossy_answers_do_not_stop_the_measurement(deep: Path):
    drafter, lossy = judging_drafter(deep), ControllerOptions(exit=0.5, lossy=True)
    with running(deep, drafter=drafter, governed=True, measure=0.05) as client:
        switchback = client.engine.loop.planner.switchback
        assert switchback is not None
        client.ask(prompts([9, 12]), 40, controller=lossy, speculate=False)
        busy = switchback.busy
        client.ask(prompts([9, 12]), 40, "again-{}", controller=lossy, speculate=False)
        assert switchback.busy > busy > 0


def test_version_of_another_domain_renews_no_loss_budget(target_dir: Path):
    with running(target_dir, "eagle", governed=True, measure=0.005) as client:
        pool, switchback = client.engine.pool, client.engine.loop.planner.switchback
        assert pool is not None
        assert switchback is not None
        pool.open("code", 1, weights_of("eagle", target_dir))
        budget = switchback.budget
        client.engine.drafters("code").stage(2, weights_of("eagle", target_dir, 1.0))
        client.swapped_to(2, "code")
        assert switchback.budget is budget


def test_version_that_rests_renews_no_loss_budget(target_dir: Path):
    drafter = Mixed(make_drafter("eagle", target_dir))
    with running(target_dir, drafter=drafter, governed=True, measure=0.005) as client:
        switchback = client.engine.loop.planner.switchback
        assert switchback is not None
        budget = switchback.budget
        client.engine.stage(2, drafter.weights())
        client.swapped_to(2)
        assert switchback.budget is budget


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
