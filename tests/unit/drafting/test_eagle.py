"""EAGLE: native trees, costs of their levels, and first versions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from osd.config import EagleSettings
from osd.drafting import DrafterError, autoregressive, initial
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.growth import DraftBudget
from osd.drafting.growth.best_first import BestFirst
from osd.drafting.growth.chance_table import ChanceTable
from osd.drafting.session import CommittedTokens, DraftPrices, DraftRequest, Runtime
from osd.economy.costs import CostModel
from osd.economy.plan import StepBudget
from osd.engine.request import SamplingParams
from osd.runtime.native import kernels
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import TreeBuilder
from tests.tiny import make_tiny
from tests.unit.drafting.sequences import drafting, expand_tree, random_drafter

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def eagle(target_dir: Path) -> Eagle:
    return random_drafter(EagleSettings(vocabulary=150), target_dir)


def test_uncalled_drafter_keeps_no_rows_of_other_sequences(eagle: Eagle) -> None:
    session, width = eagle.session(Runtime(2, 40, 8)), 48
    session.open(0, 1)
    for token in range(4):
        step = torch.zeros(100, width)
        session.commit(0, CommittedTokens([token], step[:1]))
    tokens, states = session.unread(0)
    assert tokens == [0, 1, 2, 3]
    assert [state.untyped_storage().nbytes() for state in states[:-1]] == [4 * width] * 3


native = pytest.mark.skipif(kernels() is None, reason="the kernels were not built")


def close(got: Tensor, goal: Tensor) -> None:
    """Compare within the rounding of kernels that use bfloat16."""
    assert float((got - goal).norm() / goal.norm()) < 5e-3
    torch.testing.assert_close(got, goal, rtol=5e-3, atol=1e-2 * float(goal.abs().max()))


class RandomChances(ChanceTable):
    """Random chances that increase with the drafter's estimate."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        known, firsts, self.edges = super().read(False)
        self.of = torch.rand(2, *known.shape, generator=random, dtype=torch.float64).sort(-1).values
        self.firsts = torch.rand(2, *firsts.shape, generator=random, dtype=torch.float64)
        self.firsts[:, 0] = 1.0  # all roots are expanded

    def chance_at(self, drawn: bool, depth: int, rank: int, estimate: float) -> float:
        bucket = int(torch.bucketize(torch.tensor(estimate, dtype=torch.float64), self.edges, right=True))
        depths, ranks, _ = self.of[0].shape
        return float(self.of[int(drawn), min(depth, depths - 1), min(rank, ranks - 1), bucket])

    def first_at(self, drawn: bool, depth: int) -> float:
        return float(self.firsts[int(drawn), min(depth, len(self.firsts[0]) - 1)])

    def read(self, drawn: bool) -> tuple[Tensor, Tensor, Tensor]:
        return self.of[int(drawn)], self.firsts[int(drawn)], self.edges


class Replay:
    """Source that replays the logits of grown trees."""

    levels, reach, block = None, None, 1

    def __init__(self, logits: Tensor, support: Tensor) -> None:
        self.logits, self.support = logits, support

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        return self.logits[rows, 1 + nodes]


@native
@pytest.mark.parametrize("rho", [3.0, 5.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row_costs", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("call_costs", [0.0, 0.05, 0.3])
def test_native_trees_equal_stepwise_best_first(
    eagle: Eagle, rho: float, temperature: float, row_costs: float, call_costs: float
) -> None:
    slots, limits = [3, 0, 4, 1], torch.tensor([16, 0, 2, 5])
    random = torch.Generator().manual_seed(int(1000 * row_costs + 100 * call_costs))
    growth = BestFirst(16)
    growth.table = RandomChances(random)
    step = StepBudget(rho, 4, 1 + row_costs * np.arange(40) ** 1.2, CostModel())
    calls = call_costs * np.arange(24) ** 0.5
    session = drafting(eagle, slots)

    def call(rows: Sequence[int], depth: int) -> float:
        return float(calls[min(len(rows), 23)]) if depth else 0.0

    sampling, budget = SamplingBatch.of([SamplingParams(temperature=temperature)] * 4), DraftBudget(limits, step, call)
    plan = growth.plan_for(Replay(torch.empty(0), session.support), sampling, budget)
    native_draft = session.trees(slots, plan, calls)
    native_trees = native_draft.draft
    replay = Replay(native_draft.logits, session.support)
    stepwise_trees = growth.grow(replay, sampling, Noise.of_seeds([1] * 4, [0] * 4, CPU), budget)
    for name in ("tokens", "parents", "sizes", "columns", "draw"):
        assert getattr(native_trees, name).equal(getattr(stepwise_trees, name)), name
    torch.testing.assert_close(native_trees.estimates, stepwise_trees.estimates, rtol=1e-12, atol=0)
    assert plan.room == [16, 0, 2, 5]
    assert native_draft.expanded[0] == 3
    assert native_trees.sizes[1] == 0
    assert (native_trees.sizes <= limits).all()
    # The logits of each node equal those of expanding it separately.
    stepwise = drafting(eagle, slots)
    row = int(native_trees.sizes.argmax())
    size = int(native_trees.sizes[row])
    alone = expand_tree(
        stepwise, slots[row], native_trees.tokens[row, :size].tolist(), native_trees.parents[row, :size].tolist()
    )
    expanded = [0, *(1 + node for node in range(size) if (native_trees.parents[row] == node).any())]
    close(native_draft.logits[row, expanded], alone[expanded])


@native
def test_proposal_uses_native_trees_and_reports_costs(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, costs, noise = [3, 0], CostModel(), Noise.of_seeds([1] * 2, [0] * 2, CPU)
    # Forwards are slow enough that the measured time of calls has no influence.
    step = StepBudget(2e-4, 2, 1e4 * np.array([0.0, *np.linspace(1, 1.05, 40)]), costs)
    request = DraftRequest(
        slots, [5, 7], [SamplingParams(temperature=0)] * 2, prices=DraftPrices(step, [50, 50], [0, 0])
    )
    session = drafting(eagle, slots)
    with monkeypatch.context() as patched:
        patched.setattr(session, "expand", None)
        proposal = session.propose(request, BestFirst(16), noise)
    stepwise = drafting(eagle, slots)
    monkeypatch.setattr(stepwise, "trees", lambda slots, plan, calls: None)
    expected = stepwise.propose(request, BestFirst(16), noise)
    for native_tree, stepwise_tree in zip(proposal.trees, expected.trees, strict=True):
        assert native_tree.tokens
        assert (native_tree.tokens, native_tree.parents) == (stepwise_tree.tokens, stepwise_tree.parents)
    assert set(costs.table().calls) == {"the first call of eagle", "a further call of eagle"}
    assert costs.by_levels("eagle")


def test_report_adds_overhead_to_the_first_level(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, costs, reported = [3, 0], CostModel(), list[tuple[Any, ...]]()
    step = StepBudget(2e-4, 2, 1e4 * np.array([0.0, *np.linspace(1, 1.05, 40)]), costs)
    request = DraftRequest(
        slots, [5, 7], [SamplingParams(temperature=0)] * 2, prices=DraftPrices(step, [50, 50], [9, 4])
    )
    session = drafting(eagle, slots)
    monkeypatch.setattr(session, "trees", lambda slots, plan, calls: None)
    clock = itertools.count(0.0)  # one second per reading
    monkeypatch.setattr(autoregressive, "timestamp", lambda device: next(clock))
    monkeypatch.setattr(costs, "observe_levels", lambda *arguments: reported.append(arguments))
    session.propose(request, BestFirst(16), Noise.of_seeds([1] * 2, [0] * 2, CPU))
    ((kind, names, counts, seconds, missed),) = reported
    assert (kind, names[:2], counts[0], missed) == (
        "eagle", ("the first call of eagle", "a further call of eagle"), 2, 13,
    )  # fmt: skip
    assert len(seconds) == len(counts) > 1
    assert set(seconds[1:]) == {1.0}
    assert sum(seconds) == next(clock) - 1


def test_eagle_refuses_a_target_of_two_layers(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="needs a target of at least 3 layers, this one has 2"):
        initial(EagleSettings(), make_tiny(tmp_path, layers=2), tmp_path)


def test_first_versions_of_eagle_tap_distinct_layers() -> None:
    for layers in range(3, 40):
        first, middle, last = Eagle.usual_taps(layers)
        assert 0 <= first < middle < last < layers
