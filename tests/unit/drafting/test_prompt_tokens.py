"""Prompt tokens: riders in the target's forward, cuts in training, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from osd.config import PromptTokensSettings, TrainerSettings
from osd.drafting import initial
from osd.drafting.growth import GROWTHS, Growth
from osd.drafting.prompt_tokens.drafter import PromptTokens, PromptTokensSession
from osd.drafting.session import CommittedTokens, DraftPrices, DraftRequest, Proposal, Runtime, TargetRows, Tree
from osd.economy.costs import CostModel
from osd.economy.plan import StepBudget
from osd.learning.distiller import Distiller
from osd.learning.objective import DistillationObjective
from osd.target.model import load_model
from osd.verification.noise import Noise
from osd.verification.sampling import GREEDY
from osd.verification.tree import ROOT
from tests.tiny import VOCABULARY
from tests.unit.drafting.driver import Driver
from tests.unit.drafting.sequences import at_places, expand_chain, loss_at_cuts, trace_batch

TOKENS, LENGTH = 3, 20


def made(target_dir: Path, **more: int) -> PromptTokens:
    torch.manual_seed(3)
    return initial(PromptTokensSettings(tokens=TOKENS, **more), target_dir, target_dir)


def some_tokens(count: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def drafting(drafter: PromptTokens, slots: int = 2) -> PromptTokensSession:
    return drafter.session(Runtime(slots, 64, 9))


def request_of(limits: Sequence[int]) -> DraftRequest:
    return DraftRequest(list(range(len(limits))), list(limits), [GREEDY] * len(limits))


def propose(session: PromptTokensSession, growth: Growth, limits: Sequence[int]) -> Proposal:
    index = torch.arange(len(limits))
    return session.propose(request_of(limits), growth, Noise(index, index, index))


def answers(session: PromptTokensSession) -> list[Tensor]:
    """Return the target's logits at each prompt token after the text of slot 0."""
    (reached,) = session.reach([0]).tokens
    return [logits[0] for logits in expand_chain(session, [0], torch.zeros(1, reached - 1, dtype=torch.int64))]


@pytest.mark.parametrize("bucketed", [False, True], ids=["kernels", "bucketed"])
@pytest.mark.parametrize("copies", [1, 2])
def test_rider_logits_equal_training_logits(target_dir: Path, copies: int, bucketed: bool) -> None:
    drafter, text = made(target_dir, copies=copies), some_tokens(1)[0].tolist()
    driver = Driver(drafter, target_dir, bucketed=bucketed)
    driver.read(0, text[:9])
    first_answers = answers(driver.session)
    driver.accept(0, text[9], text[10])
    # After 8 and after 10 tokens, each followed by one token of the target.
    for logits, length in ((first_answers, 8), (answers(driver.session), 10)):
        assert len(logits) == TOKENS
        for level, got in enumerate(logits):
            batch = at_places(torch.tensor([text]), None, [(0, length + 1 + level)])
            with torch.no_grad():
                goal = drafter.unroll(batch, TOKENS)[level][0]
            assert torch.allclose(got, goal, atol=2e-2, rtol=1e-3), (got - goal).abs().max()


def test_draft_carries_riders_for_the_next_draft(target_dir: Path) -> None:
    driver, text = Driver(made(target_dir), target_dir), some_tokens(1)[0].tolist()
    driver.session.open(1, text[0])
    growth = GROWTHS["top_k_tree"](budget=6, top_k=2, depth=3)
    (tree,) = driver.propose([1], [6], growth).trees
    assert (list(tree.rider_tokens), list(tree.rider_parents)) == ([-1, -2, -3], [-1, 0, 1])
    driver.read(0, text[:9])
    (tree,) = driver.propose([0], [6], growth).trees
    assert (len(tree.tokens), len(tree.rider_tokens)) == (6, TOKENS * 7)
    for limit, drafted in ((8, TOKENS), (0, 0)):
        (tree,) = driver.propose([0], [limit], GROWTHS["chain"](depth=8)).trees
        assert (len(tree.tokens), bool(tree.rider_tokens)) == (drafted, limit > 0)


def test_proposal_without_riders_has_no_embeddings(target_dir: Path) -> None:
    session = drafting(made(target_dir))
    session.open(0, 5)
    nothing = Proposal([Tree([], [], ())])
    assert session.ride(request_of([8]), GROWTHS["best_first"](budget=8), nothing).embedded is not None
    assert session.ride(request_of([0]), GROWTHS["best_first"](budget=8), nothing) is nothing


def test_riders_of_least_value_are_dropped(target_dir: Path) -> None:
    driver = Driver(made(target_dir, rows=6), target_dir)
    driver.read(0, some_tokens(1)[0, :9].tolist())
    (tree,) = driver.propose([0], [3], GROWTHS["chain"](depth=3)).trees
    assert len(tree.rider_tokens) == 6
    assert [sum(parent == node for parent in tree.rider_parents) for node in (-1, 0, 1, 2)] == [1, 1, 1, 1]


def test_riders_stay_within_the_context(target_dir: Path) -> None:
    session = made(target_dir).session(Runtime(2, 12, 9))
    for slot, length in ((0, 9), (1, 10)):
        session.open(slot, 1)
        session.commit(slot, CommittedTokens([2] * (length - 1)))
    trees = propose(session, GROWTHS["chain"](depth=3), [3, 3]).trees
    assert [len(tree.rider_tokens) for tree in trees] == [3, 0]


def test_priced_riders_include_rare_probes(target_dir: Path) -> None:
    def ridden(slope: float, steps: int, kept: bool) -> list[int]:
        session = made(target_dir).session(Runtime(1, 2000, 9))
        session.open(0, 1)
        session.commit(0, CommittedTokens([2, 3]))
        nothing = Proposal([Tree([], [], ())])
        seconds = 1 + slope * np.arange(40)
        counts = []
        for _ in range(steps):
            priced = replace(request_of([8]), prices=DraftPrices(StepBudget(1.0, 1, seconds, CostModel())))
            (tree,) = session.ride(priced, GROWTHS["best_first"](budget=8), nothing).trees
            counts.append(len(tree.rider_tokens))
            outcome = Tree([5], [-1], ["prompt_tokens"])
            session.commit(
                0, CommittedTokens([4], None, TargetRows(outcome, [0] if kept else [], torch.zeros(2, 9), None))
            )
        return counts

    assert set(ridden(0.01, 60, kept=True)) == {TOKENS}
    wrong = ridden(0.3, 1500, kept=False)[60:]
    assert 0 < sum(map(bool, wrong)) < 0.03 * len(wrong)
    assert set(wrong) == {0, TOKENS}


def test_riders_of_another_draft_follow_its_likely_end(target_dir: Path) -> None:
    def ridden(added: Sequence[float], chances: Sequence[float], steps: int = 1) -> list[list[int]]:
        """Return the parents of the riders of each step."""
        session = made(target_dir).session(Runtime(1, 64, 9))
        session.open(0, 1)
        session.commit(0, CommittedTokens([2, 3]))
        priced = replace(request_of([8]), prices=DraftPrices(StepBudget(1.0, 1, 1 + 0.05 * np.arange(40), CostModel())))
        recalled = Proposal([replace(Tree.chain([7, 8, 9, 10, 11], "recall"), chances=chances)])
        growth = GROWTHS["best_first"](budget=8)
        return [list(session.ride(priced, growth, recalled, added).trees[0].rider_parents) for _ in range(steps)]

    useful, useless = [0.0, 0.4, 0.4, 0.4], [0.0] * 4
    assert ridden(useful, [0.1, 0.05, 0.02, 0.01, 0.0]) == [[ROOT]]
    assert ridden(useful, [0.9] * 5) == [[4]]
    assert ridden(useless, [0.9, 0.8, 0.1, 0.0, 0.0], 20) == [[1, 5, 6]] + [[]] * 19  # the first step probes


def test_cuts_of_a_forward_are_independent(target_dir: Path) -> None:
    drafter = made(target_dir, copies=2)
    tokens = some_tokens()
    places = [(0, 7), (1, 7), (0, 8), (1, 19), (0, 15)]
    with torch.no_grad():
        together = drafter.unroll(at_places(tokens, None, places), TOKENS)
        for number, place in enumerate(places):
            alone = drafter.unroll(at_places(tokens, None, [place]), TOKENS)
            for batched, single in zip(together, alone, strict=True):
                assert torch.allclose(batched[number], single[0], atol=1e-4)


def test_loss_sums_prompt_tokens_at_their_places(target_dir: Path) -> None:
    drafter, batch = made(target_dir), trace_batch(completion=12)
    objective = DistillationObjective.of(TrainerSettings(), 0)
    loss = drafter.loss(batch, objective)
    goal = loss_at_cuts(drafter.unroll(batch, TOKENS), batch, objective)
    assert loss.value.item() == pytest.approx(goal.item(), rel=1e-4)
    loss.value.backward()
    grad = drafter.prompts.grad
    assert (grad.flatten(1).norm(dim=1) > 0).all()


def test_training_changes_the_embeddings_only(target_dir: Path) -> None:
    target = load_model(target_dir, "float32", "cpu")
    drafter = PromptTokens.from_target(target, TOKENS)
    distiller = Distiller(drafter, TrainerSettings(update_tokens=1))
    distiller.step(trace_batch())
    assert all(parameter.grad is None for parameter in target.parameters())
    assert list(drafter.trained()) == ["prompts"]
    assert {name: list(value.shape) for name, value in drafter.weights().items()} == {
        "prompts": [TOKENS, 1, 64], "steps": [],
    }  # fmt: skip


def test_cuts_depend_on_the_step_alone(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd.drafting.prompt_tokens.cuts._CUTS", 3)
    drafter, batch = made(target_dir), trace_batch()
    objective = DistillationObjective.of(TrainerSettings(), 0)
    with torch.no_grad():
        first, second = (float(drafter.loss(batch, objective).value) for _ in range(2))
        drafter.steps.zero_()
        again = float(drafter.loss(batch, objective).value)
    assert first == again != second
