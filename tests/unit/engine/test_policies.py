"""Growth, verification and planning inside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from osd.config import GROWTH_SETTINGS
from osd.drafting import Drafter, trainable
from osd.drafting.compatibility import IncompatibleError
from osd.drafting.eagle.session import EagleSession
from osd.economy.costs import CostModel
from osd.economy.plan import Ready, equal_drafts
from osd.engine import planner
from osd.engine import round as rounds
from osd.engine.policy import Policy
from osd.metrics import SpeculationCounts
from osd.runtime.native import kernels
from osd.runtime.top import top
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


def counts_of(directory: Path, drafter: Drafter, tokens: int, own: Policy, **more: Any) -> SpeculationCounts:
    """The counts of a request that asks for a policy."""
    with running(directory, drafter=drafter, **more) as client:
        return client.ask([[1, 2, 3]], tokens, policy=own)[0].counts


def test_a_tree_keeps_more_than_one_chain_of_the_same_drafter(target_dir: Path) -> None:
    kept = []
    with running(target_dir, "eagle", slots=1) as client:
        for kind, rule in (("chain", "chain"), ("top_k_tree", "naive")):
            results = client.ask(prompts(LENGTHS), 60, kind + " {}", policy=policy(kind, rule))
            kept.append(sum(result.counts.accepted for result in results))
    assert kept[1] > kept[0]


def test_a_pair_that_would_bias_the_output_is_no_policy() -> None:
    with pytest.raises(IncompatibleError, match="verification siblings would bias the output: growth top_k_tree"):
        policy("top_k_tree", "siblings")


@pytest.mark.parametrize(("odds", "size"), [(30.0, 4), (-30.0, 2)], ids=["sure", "in doubt"])
def test_drafts_are_as_long_as_the_drafters_head_says(target_dir: Path, odds: float, size: int) -> None:
    drafter = trainable(make_drafter("eagle", target_dir)).add_head()
    assert drafter.acceptance is not None
    drafter.acceptance.odds.bias.data.fill_(odds)
    counts = counts_of(target_dir, drafter, 30, policy("acceptance_head", "chain"))
    assert counts.drafted >= size * (counts.rounds - 3)
    assert counts.drafted <= size * counts.rounds


def useless(target_dir: Path) -> Drafter:
    drafter = make_drafter("eagle", target_dir)
    for parameter in drafter.parameters():
        parameter.data.normal_(0, 0.02)
    return drafter


def test_planned_drafts_change_no_output_and_stop_where_they_do_not_pay(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the host would take so long that a useless draft costs next to nothing beside it.
    monkeypatch.setattr(CostModel, "observe_host", lambda *measured: None)
    with running(target_dir, "eagle", drafter=useless(target_dir), governed=True) as client:
        assert tokens_of(client.ask(prompts(LENGTHS), 80)) == oracle.all(prompts(LENGTHS), 80)
        counters = client.engine.counters()
    total = counters.speculation()
    assert total.drafted > 0  # probes
    assert total.drafted < counters.completion_tokens


def test_the_plan_counts_sequences_that_still_read_their_prompts(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[int, int, int]] = []

    def watched(chances: Any, ready: Sequence[Ready], budget: Any, kind: str, streams: Any, riders: float) -> list[int]:
        planned.append((len(ready), *streams))
        return equal_drafts(chances, ready, budget, kind, streams, riders)

    monkeypatch.setattr(planner, "equal_drafts", watched)
    with running(target_dir, "eagle", governed=True, prefix_cache=False) as client:
        client.ask(prompts((8, 40, 40, 40)), 60)  # a round reads 16 tokens of prompts
    assert max(ready + others + coming for ready, others, coming in planned) == 4
    assert any(coming for _, _, coming in planned)
    assert not planned[-1][2]


def test_what_a_request_asks_for_is_not_governed(target_dir: Path) -> None:
    counts = counts_of(target_dir, useless(target_dir), 60, policy("chain", "chain"), governed=True)
    assert counts.drafted >= 3 * (counts.rounds - 2)


def test_a_heuristic_draft_shrinks_while_nothing_is_accepted(target_dir: Path) -> None:
    counts = counts_of(target_dir, useless(target_dir), 60, policy("heuristic", "chain"))
    assert counts.rounds <= counts.drafted < 1.5 * counts.rounds, "it begins with two tokens and goes on with one"


def test_the_path_of_most_probable_tokens_is_followed_through_a_tree() -> None:
    #      root -> 7, 8;  7 -> 9;  8 -> 9, 5
    tokens, parents = [7, 8, 9, 9, 5], [-1, -1, 0, 1, 1]
    assert follow(tokens, parents, [8, 0, 5, 0, 0, 4]) == ([1, 4], 4)
    assert follow(tokens, parents, [8, 0, 6, 0, 0, 4]) == ([1], 6)
    assert follow(tokens, parents, [3, 0, 5, 0, 0, 4]) == ([], 3)
    assert follow([], [], [2]) == ([], 2)
    assert follow([7, 7], [-1, -1], [7, 1, 2]) == ([0], 1)  # of twins the first


@pytest.mark.skipif(kernels() is None, reason="the kernels were not built")
@pytest.mark.parametrize("kind", ["chain", "confidence", "heuristic"])
def test_greedy_chains_are_drafted_in_one_call(target_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    def expand(*_: object) -> None:
        raise AssertionError("a greedy chain was drafted step by step")

    monkeypatch.setattr(EagleSession, "expand", expand)
    monkeypatch.setattr(rounds, "top", lambda *asked: looks.append(asked) or top(*asked))
    with running(target_dir, "eagle", slots=2) as client:
        for result in client.ask(prompts(LENGTHS), 12, policy=policy(kind, "chain")):
            assert len(result.tokens) == 12
            assert result.counts.drafted > 0
    assert looks, "the most probable tokens of all rows are found at once"
