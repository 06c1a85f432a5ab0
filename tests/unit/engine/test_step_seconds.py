"""Seconds of an engine's steps: by domain, for upkeep, and as input of the planner."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.drafting.recall.drafter import Recall
from osd.engine import step as step_module
from osd.engine.planner import Planner
from osd.engine.request import SamplingParams
from osd.engine.step import StepOutcome
from osd.runtime.native import kernels
from osd.runtime.top import Top, most_probable
from tests.device import skip_unless_cpu
from tests.unit.engine.harness import prompts, running


@skip_unless_cpu("steps that record a graph are not counted, and on a GPU most of these do")
def test_engine_counts_step_and_token_seconds(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        client.ask(prompts([5, 9]), 12)
        counters = client.settled()
        assert counters.busy_by_domain == {"general": pytest.approx(counters.busy_seconds, rel=0.5)}
        assert counters.busy_by_domain["general"] <= counters.busy_seconds
        assert counters.rows >= counters.forwards > 0
        assert counters.busy_seconds < counters.token_seconds < 2 * counters.busy_seconds + 1e-6
        client.engine.set_speculation(False)
        client.submit("plain", prompts([5])[0], 12, ignore_eos=True)
        client.wait()
        assert client.settled().busy_by_domain["general"] > counters.busy_by_domain["general"]
        assert client.settled().token_seconds > counters.token_seconds


@skip_unless_cpu("PyTorch computes the top tokens twice")
@pytest.mark.skipif(kernels() is None, reason="PyTorch computes the top tokens twice")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_top_tokens_of_greedy_requests_are_not_upkeep(target_dir: Path, monkeypatch, temperature: float):
    upkeep: list[float] = []
    learn = Planner.observe

    def observe(self: Planner, outcome: StepOutcome, seconds: float) -> None:
        upkeep.append(sum(outcome.upkeep_seconds.values()))
        learn(self, outcome, seconds)

    def slow(*args: Any) -> Top:
        clock.append(clock[-1] + 0.1)
        return most_probable(*args)

    clock = [0.0]
    monkeypatch.setattr(Planner, "observe", observe)
    monkeypatch.setattr(step_module, "most_probable", slow)
    monkeypatch.setattr(step_module, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    with running(target_dir, drafter=Recall()) as client:
        client.submit("0", prompts([5])[0], 6, SamplingParams(temperature, seed=1), ignore_eos=True)
        client.wait()
    assert len(upkeep) > 1
    assert {round(seconds, 6) for seconds in upkeep} == {0.1 if temperature > 0 else 0.0}


def test_outcomes_have_the_seconds_of_their_drafters(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[StepOutcome] = []
    learn = Planner.observe
    monkeypatch.setattr(
        Planner, "observe", lambda self, outcome, seconds: (outcomes.append(outcome), learn(self, outcome, seconds))
    )
    with running(target_dir, "eagle") as client:
        client.submit("0", prompts([5])[0], 12, ignore_eos=True)
        client.wait()
        client.settled()
    for outcome in outcomes:
        drafted = {result.sequence.drafter for result in outcome.sequences if result.proposed}
        assert outcome.draft_seconds.keys() == drafted
        assert all(seconds > 0 for seconds in outcome.draft_seconds.values())
    assert any(outcome.draft_seconds for outcome in outcomes)
