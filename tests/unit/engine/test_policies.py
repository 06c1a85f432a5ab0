"""Growth, verification and planning inside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from osd.config import GROWTH_SETTINGS
from osd.drafting import Drafter, trainable
from osd.drafting.eagle.session import EagleSession
from osd.economy.costs import CostModel
from osd.economy.plan import Ready, equal_drafts
from osd.engine import planner
from osd.engine import step as step_module
from osd.engine.policy import Policy
from osd.metrics import SpeculationCounts
from osd.runtime.native import kernels
from osd.runtime.top import most_probable
from osd.verification.base import follow
from tests.unit.engine.harness import Oracle, make_drafter, prompts, running, tokens_of

LENGTHS = (5, 17, 3, 30)
GROWTHS: dict[str, dict[str, Any]] = {
    "chain": {"depth": 3},
    "confidence": {"depth": 4, "eta": 0.01},
    "acceptance_head": {"depth": 4, "h": 0.7},
    "heuristic": {"depth": 4, "start": 2},
    "top_k_tree": {"budget": 6, "top_k": 2, "depth": 3},
}


def policy(kind: str, rule: str) -> Policy:
    return Policy.of(GROWTH_SETTINGS[kind](**GROWTHS[kind]), rule)  # type: ignore[arg-type]


def counts_of(directory: Path, drafter: Drafter, tokens: int, request_policy: Policy, **more: Any) -> SpeculationCounts:
    """Return the draft counts of a request with a policy."""
    with running(directory, drafter=drafter, **more) as client:
        return client.ask([[1, 2, 3]], tokens, policy=request_policy)[0].counts


def test_tree_gets_more_accepted_than_a_chain(target_dir: Path) -> None:
    kept = []
    with running(target_dir, "eagle", slots=1) as client:
        for kind, rule in (("chain", "chain"), ("top_k_tree", "naive")):
            results = client.ask(prompts(LENGTHS), 60, kind + " {}", policy=policy(kind, rule))
            kept.append(sum(result.counts.accepted for result in results))
    assert kept[1] > kept[0]


@pytest.mark.parametrize(("odds", "size"), [(30.0, 4), (-30.0, 2)], ids=["sure", "in doubt"])
def test_acceptance_head_sets_the_draft_length(target_dir: Path, odds: float, size: int) -> None:
    drafter = trainable(make_drafter("eagle", target_dir)).add_head()
    assert drafter.acceptance is not None
    drafter.acceptance.odds.bias.data.fill_(odds)
    counts = counts_of(target_dir, drafter, 30, policy("acceptance_head", "chain"))
    assert counts.drafted >= size * (counts.rounds - 3)
    assert counts.drafted <= size * counts.rounds


def useless_drafter(target_dir: Path) -> Drafter:
    drafter = make_drafter("eagle", target_dir)
    for parameter in drafter.parameters():
        parameter.data.normal_(0, 0.02)
    return drafter


def test_governed_drafts_stop_when_they_do_not_pay(target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch):
    # On a busy machine the time of the host would hide the cost of a useless draft.
    monkeypatch.setattr(CostModel, "observe_host", lambda *measured: None)
    with running(target_dir, "eagle", drafter=useless_drafter(target_dir), governed=True) as client:
        assert tokens_of(client.ask(prompts(LENGTHS), 80)) == oracle.all(prompts(LENGTHS), 80)
        counters = client.engine.counters()
    total = counters.speculation()
    assert total.drafted > 0  # probes
    assert total.drafted < counters.completion_tokens


def test_planner_counts_reading_sequences(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[int, int, int]] = []

    def watched(chances: Any, ready: Sequence[Ready], budget: Any, kind: str, streams: Any, riders: float) -> list[int]:
        planned.append((len(ready), *streams))
        return equal_drafts(chances, ready, budget, kind, streams, riders)

    monkeypatch.setattr(planner, "equal_drafts", watched)
    with running(target_dir, "eagle", governed=True, prefix_cache=False) as client:
        client.ask(prompts((8, 40, 40, 40)), 60)  # a step reads 16 prompt tokens
    assert max(ready + plain + coming for ready, plain, coming in planned) == 4
    assert any(coming for _, _, coming in planned)
    assert not planned[-1][2]


def test_request_policy_is_not_governed(target_dir: Path) -> None:
    counts = counts_of(target_dir, useless_drafter(target_dir), 60, policy("chain", "chain"), governed=True)
    assert counts.drafted >= 3 * (counts.rounds - 2)


def test_heuristic_draft_shrinks_without_acceptance(target_dir: Path) -> None:
    counts = counts_of(target_dir, useless_drafter(target_dir), 60, policy("heuristic", "chain"))
    assert counts.rounds <= counts.drafted < 1.5 * counts.rounds, "the first draft has two tokens, later ones have one"


def test_follow_returns_the_path_of_most_probable_tokens() -> None:
    #      root -> 7, 8;  7 -> 9;  8 -> 9, 5
    tokens, parents = [7, 8, 9, 9, 5], [-1, -1, 0, 1, 1]
    assert follow(tokens, parents, [8, 0, 5, 0, 0, 4]) == ([1, 4], 4)
    assert follow(tokens, parents, [8, 0, 6, 0, 0, 4]) == ([1], 6)
    assert follow(tokens, parents, [3, 0, 5, 0, 0, 4]) == ([], 3)
    assert follow([], [], [2]) == ([], 2)
    assert follow([7, 7], [-1, -1], [7, 1, 2]) == ([0], 1)  # the first of two equal nodes


@pytest.mark.skipif(kernels() is None, reason="the kernels were not built")
@pytest.mark.parametrize("kind", ["chain", "confidence", "heuristic"])
def test_greedy_chains_are_drafted_in_one_call(target_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    def expand(*_: object) -> None:
        raise AssertionError("a greedy chain was drafted level by level")

    monkeypatch.setattr(EagleSession, "expand", expand)
    monkeypatch.setattr(step_module, "most_probable", lambda *args: looks.append(args) or most_probable(*args))
    with running(target_dir, "eagle", slots=2) as client:
        for result in client.ask(prompts(LENGTHS), 12, policy=policy(kind, "chain")):
            assert len(result.tokens) == 12
            assert result.counts.drafted > 0
    assert looks, "the most probable tokens of all rows are computed in one call"
