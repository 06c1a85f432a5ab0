"""Static trees in the engine: acceptance counted from live steps, size by measured forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osd.config import GROWTH_SETTINGS, StaticTreeSettings
from osd.economy.costs import CostModel
from osd.engine.policy import Policy
from tests.unit.engine.harness import Oracle, make_drafter, prompts, running, tokens_of

FLAT, STEEP = {1: 1.0, 64: 1.0}, {1: 1.0, 2: 1.9, 64: 60.0}
LENGTHS = (5, 17, 3, 30)


def tree(kind: str = "static_tree", **fields: Any) -> Policy:
    rule = "siblings" if kind == "static_tree" else "naive"
    return Policy.of(GROWTH_SETTINGS[kind](budget=6, **fields), rule)  # type: ignore[arg-type]


def test_forward_cost_by_share_counts_all_sequences() -> None:
    seconds = CostModel({1: 1.0, 4: 4.0, 8: 8.0, 16: 32.0}).forward_by_share(4)
    assert seconds == {1: 4.0, 2: 8.0, 3: 20.0, 4: 32.0}
    assert CostModel({1: 1.0, 2: 2.0}).forward_by_share(5) == {1: 2.0}


@pytest.mark.parametrize("kind", ["static_tree", "sparse_tree"])
@pytest.mark.parametrize(("seconds", "size"), [(STEEP, 1), (FLAT, 6)], ids=["steep", "flat"])
def test_tree_size_follows_the_cost_of_forwards(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, kind: str, seconds: dict[int, float], size: int
) -> None:
    monkeypatch.setattr("osd.engine.loop.calibrate", lambda target, rows, report, is_idle: report(seconds))
    policy = tree(kind)
    with running(target_dir, "eagle", slots=1) as client:
        first = client.ask(prompts(LENGTHS), 24, policy=policy)
        results = client.ask(prompts(LENGTHS), 24, "later {}", policy=policy)
    assert policy.growth.max_nodes == size
    assert tokens_of(first) == tokens_of(results) == oracle.all(prompts(LENGTHS), 24)
    for later in results:
        assert later.counts.drafted <= size * later.counts.rounds
        assert later.counts.drafted > (size - 1) * later.counts.rounds * 0.8
    assert policy.growth.table is not None  # type: ignore[attr-defined]
    assert policy.growth.table.by_rank()[0] != StaticTreeSettings().acceptance[0]  # type: ignore[attr-defined]


def test_swap_resets_acceptance_counts_to_a_prior(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd.engine.loop.calibrate", lambda target, rows, report, is_idle: report(FLAT))
    policy = tree()
    drafter = make_drafter("eagle", target_dir)
    with running(target_dir, "eagle", drafter=drafter, slots=1) as client:
        client.submit("before", [1, 2, 3], 30, ignore_eos=True, policy=policy)
        client.wait()
        table = policy.growth.table  # type: ignore[attr-defined]
        counted = table.by_depth()
        client.engine.stage(2, drafter.weights())
        client.submit("after", [1, 2, 3], 2, ignore_eos=True, policy=policy)
        client.wait()
    assert table.prior == counted
