"""Mixed drafts of recall and a trained drafter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from osd.config import BestFirstSettings
from osd.drafting.growth import Growth
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import RecallSession
from osd.drafting.session import DraftRequest
from osd.economy.calls import CallGains, Candidate
from osd.economy.costs import CostModel
from osd.economy.plan import TokenRates
from osd.engine import loop
from osd.recall.memory import DraftNodes, DraftQuery
from tests.unit.engine.harness import make_drafter, prompts, running


def mixed(kind: str, directory: Path) -> Mixed:
    return Mixed(make_drafter(kind, directory))


def always_call(monkeypatch: pytest.MonkeyPatch, tokens: int = 2) -> None:
    """Let the mixed drafter call the trained drafter for every sequence in every step."""

    def decide(gains: CallGains, candidates: Sequence[Candidate], *_: Any) -> tuple[list[int], int]:
        return list(range(len(candidates))), tokens if candidates else 0

    monkeypatch.setattr(CallGains, "decide", decide)


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fixed costs, for which drafts pay, independent of the machine."""
    costs = {rows: 0.01 + 0.0001 * rows for rows in (1, 64)}
    monkeypatch.setattr(loop, "calibrate", lambda target, rows, report, is_idle: report(costs))
    for part in ("observe_forward", "observe_host", "observe_plain_host"):
        monkeypatch.setattr(CostModel, part, lambda *_: None)


@pytest.mark.usefixtures("known_costs")
def test_call_gain_falls_with_the_value_of_a_second(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gains(rho: float) -> list[float]:
        observed: list[float] = []
        always_call(monkeypatch)
        monkeypatch.setattr(TokenRates, "at", lambda *_: rho)
        monkeypatch.setattr(CallGains, "observe", lambda gains, certainty, levels, gain: observed.append(gain))
        with running(target_dir, drafter=mixed("eagle", target_dir), growth=BestFirstSettings()) as client:
            client.submit("one", prompts((16,))[0], 24, ignore_eos=True)
            client.wait()
        return observed

    assert max(gains(rho=100.0)) > 0.01
    assert max(gains(rho=1e9)) <= 0


@pytest.mark.usefixtures("known_costs")
def test_steps_without_ridden_prompt_tokens_have_no_candidates(target_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Prompt tokens have no results before their first ride."""
    counts: list[int] = []
    decide = CallGains.decide

    def noted(gains: CallGains, candidates: Any, budget: Any, kind: str) -> tuple[list[int], int]:
        counts.append(len(candidates))
        return decide(gains, candidates, budget, kind)

    monkeypatch.setattr(CallGains, "decide", noted)
    for kind, least in (("eagle", 1), ("prompt_tokens", 0)):
        counts.clear()
        with running(target_dir, drafter=mixed(kind, target_dir), growth=BestFirstSettings()) as client:
            client.submit("one", prompts((16,))[0], 12, ignore_eos=True)
            client.wait()
        assert min(counts) == least


def test_call_cost_includes_the_second_recall_draft(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, slow = RecallSession.draft, 0.01

    def slower(
        session: RecallSession, sought: Sequence[DraftQuery], request: DraftRequest, growth: Growth
    ) -> DraftNodes:
        if any(search.other is not None for search in sought):
            time.sleep(slow)
        return draft(session, sought, request, growth)

    monkeypatch.setattr(RecallSession, "draft", slower)
    always_call(monkeypatch)
    with running(target_dir, drafter=mixed("eagle", target_dir), growth=BestFirstSettings()) as client:
        client.submit("one", prompts((16,))[0], 12, ignore_eos=True)
        client.wait()
        costs: Any = client.engine.loop.planner.costs
    assert costs.proposal("chains of eagle", 1, 2) > slow
