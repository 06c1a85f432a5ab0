"""Recall and a trained drafter together: one tree, whose nodes say where they come from, and no other output."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from osd.config import BestFirstSettings
from osd.drafting.growth import Growth
from osd.drafting.mixed.consulting import Candidate, Consulted, Consulting
from osd.drafting.mixed.drafter import Mixed
from osd.drafting.recall.session import RecallSession
from osd.drafting.session import DraftRequest
from osd.economy.costs import CostModel
from osd.engine import loop
from osd.recall.memory import Found, Sought
from tests.device import only_on_a_cpu
from tests.unit.engine.harness import Oracle, make_drafter, prompts, running


def mixed(kind: str, directory: Path) -> Mixed:
    return Mixed(make_drafter(kind, directory))


def everybody_asks(monkeypatch: pytest.MonkeyPatch, tokens: int = 2, pace: float = 1.0) -> None:
    def decide(it: Consulting, candidates: Sequence[Candidate], *_: Any) -> Consulted:
        return Consulted(list(range(len(candidates))), tokens if candidates else 0, pace)

    monkeypatch.setattr(Consulting, "decide", decide)


@pytest.mark.parametrize("kind", ["eagle", "kangaroo", "prompt_tokens"])
def test_sequences_that_do_without_the_trained_drafter_go_on_beside_those_that_ask(
    target_dir: Path, goals: list[list[int]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = itertools.count()
    monkeypatch.setattr(Consulting, "may_ask", lambda consulting: next(begun) % 2 == 0)
    growth = BestFirstSettings(governed=False)
    with running(target_dir, drafter=mixed(kind, target_dir), growth=growth) as client:
        results = client.ask_greedily(goals, 24, capture=True)
    assert [kind in one.counts.by_source for one in results] == [True, False, True, False, True]


@only_on_a_cpu("rounds that record a graph are not counted, and on a GPU most of these few do")
def test_what_is_asked_of_an_engine_says_what_calls_of_the_trained_drafter_cost(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody_asks(monkeypatch, tokens=3)
    for drafter, called in ((mixed("eagle", target_dir), True), (make_drafter("eagle", target_dir), False)):
        with running(target_dir, drafter=drafter, growth=BestFirstSettings()) as client:
            client.submit("0", prompts([5])[0], 24, ignore_eos=True)
            client.wait()
            client.settled()
            calls = client.engine.workloads()["general"].calls
        assert len(calls) == (client.engine.settings.engine.slots if called else 0)
        assert all(seconds > 0 for seconds in calls)


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay and rows cost, whatever the machine does."""
    costs = {rows: 0.01 + 0.0001 * rows for rows in (1, 64)}
    monkeypatch.setattr(loop, "calibrate", lambda target, most, told, rests: told(costs))
    observe = CostModel.observe_forward
    monkeypatch.setattr(CostModel, "observe_forward", lambda it, rows, _: observe(it, rows, it.at_rest(rows)))
    for host in ("observe_host", "observe_plain_host"):
        monkeypatch.setattr(CostModel, host, lambda *_: None)


@pytest.mark.usefixtures("known_costs")
def test_what_came_of_drafts_with_calls_is_told_with_what_they_promised(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, int]] = []
    everybody_asks(monkeypatch)
    monkeypatch.setattr(Consulting, "outcome", lambda consulting, promised, came: told.append((promised, came)))
    with running(target_dir, drafter=mixed("eagle", target_dir), growth=BestFirstSettings()) as client:
        for name in ("first", "again"):
            client.submit(name, prompts((16,))[0], 24, ignore_eos=True, capture=True)
            client.wait()
        counts = client.engine.counters().speculation()
    assert sum(came for _, came in told) == counts.accepted > 0
    assert 0 < sum(promised for promised, _ in told) <= counts.drafted


@pytest.mark.usefixtures("known_costs")
def test_what_a_call_brought_is_less_where_fewer_of_its_tokens_come_and_where_a_second_is_worth_more(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gains(kept: float, pace: float) -> list[float]:
        found: list[float] = []
        everybody_asks(monkeypatch, pace=pace)
        monkeypatch.setattr(Consulting, "kept", kept)
        monkeypatch.setattr(Consulting, "observe", lambda consulting, sure, brought, levels: found.extend(brought))
        with running(target_dir, drafter=mixed("eagle", target_dir), growth=BestFirstSettings()) as client:
            client.submit("one", prompts((16,))[0], 24, ignore_eos=True)
            client.wait()
        return found

    assert max(gains(kept=1.0, pace=1e-9)) > 0.01
    assert max(gains(kept=0.0, pace=1e-9)) < 1e-6
    assert min(gains(kept=1.0, pace=1e9)) < -1


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize(("kind", "silent"), [("eagle", False), ("prompt_tokens", True)])
def test_rounds_without_a_word_of_the_trained_drafter_count_as_such(
    target_dir: Path, kind: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of prompt tokens before they rode once."""
    found: list[int] = []
    decide = Consulting.decide

    def noted(consulting: Consulting, candidates: Any, worth: Any, name: str, silent: int = 0) -> Consulted:
        found.append(silent)
        return decide(consulting, candidates, worth, name, silent)

    monkeypatch.setattr(Consulting, "decide", noted)
    with running(target_dir, drafter=mixed(kind, target_dir), growth=BestFirstSettings()) as client:
        client.submit("one", prompts((16,))[0], 12, ignore_eos=True)
        client.wait()
    assert found
    assert max(found) == silent


def test_what_asking_takes_has_the_second_draft_of_recall_in_it(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, slow = RecallSession.draft, 0.01

    def slower(session: RecallSession, sought: Sequence[Sought], asked: DraftRequest, growth: Growth) -> Found:
        if any(one.other is not None for one in sought):
            time.sleep(slow)
        return draft(session, sought, asked, growth)

    monkeypatch.setattr(RecallSession, "draft", slower)
    everybody_asks(monkeypatch)
    with running(target_dir, drafter=mixed("eagle", target_dir), growth=BestFirstSettings()) as client:
        client.submit("one", prompts((16,))[0], 12, ignore_eos=True)
        client.wait()
        costs: Any = client.engine.loop.planner.costs
    assert costs.proposal("chains of eagle", 1, 2) > slow


def test_versions_of_the_trained_drafter_are_swapped_in_while_recall_stays(target_dir: Path, oracle: Oracle) -> None:
    first, second = mixed("eagle", target_dir), make_drafter("eagle", target_dir)
    prompt = prompts([9], seed=4)[0]
    with running(target_dir, drafter=first, growth=BestFirstSettings(governed=False)) as client:
        client.submit("before", prompt, 40, ignore_eos=True, capture=True)
        client.wait()
        known = sum(table.used() for table in client.engine.pool.memories("general").tables)
        client.engine.drafters("general").stage(2, second.weights(), Mixed(second))
        client.swapped_to(2)
        client.submit("after", prompt, 40, ignore_eos=True, capture=True)
        results = client.wait()
        assert sum(table.used() for table in client.engine.pool.memories("general").tables) >= known > 0
        assert ("general", 2) in client.engine.counters().by_version
    assert results["before"].tokens == results["after"].tokens == oracle.greedy(prompt, 40)
    assert results["after"].counts.accepted > results["before"].counts.accepted
