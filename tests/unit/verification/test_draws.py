"""Drafts with sparse or no distributions, and trees whose siblings are drawn in several ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from osd.drafting.compatibility import IncompatibleError, check_compatible
from osd.drafting.growth import GROWTHS, DraftBudget, DraftOutcome, Growth, Source
from osd.drafting.growth.base import expanded
from osd.verification import VERIFICATIONS, Verdict
from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import ROOT, DraftBatch, Draw, TreeBuilder
from tests.unit.verification.enumeration import (
    ForkingNoise,
    Law,
    Toy,
    as_if,
    check_integrity,
    largest_error,
    law_of,
    plain_sampling,
)

PATHS = [(0,), (1,), (0, 0)]
SHARED = {rule: GROWTHS["static_tree"](paths=PATHS) for rule in ("siblings", "traversal", "naive")}
READS_Q: dict[str, Growth] = {
    "chain": GROWTHS["chain"](2),
    "block": GROWTHS["chain"](2),
    **SHARED,
    "greedy_multidraft": GROWTHS["static_tree"](paths=PATHS, draw="top_then_drawn"),
    "k_seq": GROWTHS["static_tree"](paths=PATHS, draw="iid"),
}


def narrow(seed: int, support: int) -> Toy:
    """Return a toy whose drafter gives two tokens after each history, in a draft vocabulary with ``support``."""
    toy = Toy.random(seed, 4 if support else 3, 3, agreement=0.2, support=support)
    best = toy.q.topk(2)
    q = torch.zeros_like(toy.q).scatter_(1, best.indices, best.values)
    return replace(toy, q=q / q.sum(-1, keepdim=True))


def sparse(draft: DraftBatch, kept: int) -> DraftBatch:
    """Return the draft with only the ``kept`` most probable tokens of each distribution."""
    assert draft.q is not None
    best = draft.q.topk(kept)
    columns = (best.indices[draft.q_row] == draft.columns[:, :, None]).long().argmax(-1)
    ids = best.indices if draft.support is None else draft.support[best.indices]
    return replace(draft, q=best.values, q_ids=ids, columns=columns)


@pytest.mark.parametrize("support", [0, 3])
@pytest.mark.parametrize("rule", READS_Q)
def test_sparse_q_gives_the_output_law_of_dense_q(rule: str, support: int) -> None:
    toy, growth = narrow(3, support), READS_Q[rule]

    def law(kept: int, exchanged: bool = False) -> Law:
        def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
            draft = growth.grow(toy, plain_sampling(batch), noise, DraftBudget(torch.full((batch,), growth.max_nodes)))
            draft = sparse(draft, kept) if kept else draft
            check_integrity(draft)
            draft = replace(draft, q=draft.q.flip(1)) if exchanged else draft
            return draft, VERIFICATIONS[rule].verify(draft, toy.target(draft), noise)

        return law_of(run, toy, 3)

    dense = law(0)
    for result in (law(2), law(3)):  # the third token has probability 0
        assert result.error < 1e-9
        assert result.accepted == pytest.approx(dense.accepted, abs=1e-12)
    if rule != "naive":
        assert law(2, exchanged=True).error > 1e-5


class InSeveralWays(Growth):
    """Policy that draws two children of the root in a way, and two children of the first of these in another way."""

    name = "in_several_ways"
    fixed_width = True
    max_nodes = 4

    def __init__(self, above: Draw, below: Draw) -> None:
        self.ways, self.draws = (above, below), frozenset({above, below})

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: DraftBudget) -> DraftBatch:
        limits = budget.limits
        builder, rows = TreeBuilder(len(limits), 4, source.support), (limits >= self.max_nodes).nonzero().squeeze(-1)
        for node, draw in zip((ROOT, 0), self.ways, strict=True):
            parents = torch.full_like(rows, node)
            places, q, _ = expanded(builder, source, sampling.for_trees(), rows, parents)
            left = q.clone()
            for child in range(2):
                drawn = noise.rows(rows).pick(left, Purpose.DRAFT, 2 * (node + 1) + child)
                if draw is Draw.WITHOUT_REPLACEMENT:
                    left[torch.arange(len(rows)), drawn] = 0.0
                builder.add(rows, parents, drawn, places, draw)
        return builder.finish(Draw.IID)


def error(growth: Growth, rule: str, claimed: Draw | None = None) -> float:
    return largest_error(
        growth, VERIFICATIONS[rule].verify, lambda draft: draft if claimed is None else as_if(draft, claimed)
    )


@pytest.mark.parametrize("ways", [(Draw.IID, Draw.WITHOUT_REPLACEMENT), (Draw.WITHOUT_REPLACEMENT, Draw.IID)])
@pytest.mark.parametrize("rule", ["siblings", "traversal", "naive"])
def test_tree_with_two_ways_of_drawing_is_lossless(rule: str, ways: tuple[Draw, Draw]) -> None:
    growth = InSeveralWays(*ways)
    check_compatible(growth, VERIFICATIONS[rule])
    assert error(growth, rule) < 1e-9
    for claimed in ways if rule != "naive" else ():  # a single way is wrong for half of the tree
        assert error(growth, rule, claimed) > 1e-3


@pytest.mark.parametrize(("rule", "reason"), [("k_seq", "without replacement"), ("greedy_multidraft", "with repl")])
def test_rule_that_fits_only_half_of_a_tree_is_refused(rule: str, reason: str) -> None:
    with pytest.raises(IncompatibleError, match=f"in_several_ways draws siblings {reason}"):
        check_compatible(InSeveralWays(Draw.WITHOUT_REPLACEMENT, Draw.IID), VERIFICATIONS[rule])


def test_growth_policy_has_default_limits() -> None:
    growth = InSeveralWays(Draw.IID, Draw.IID)
    assert growth.first_limit == growth.next_limit(2, drafted=2, accepted=0) == 4
    assert growth.observe([DraftOutcome([ROOT], [0])], lambda together: {1: together}) is False
    assert growth.stop is None


def chosen_tree(toy: Toy, batch: int) -> DraftBatch:
    """Return trees with two tokens after the root and one after the first of them, chosen without randomness."""
    builder, rows = TreeBuilder(batch, 3, None, sources=("table", "luck")), torch.arange(batch)
    for parent, token, source in ((ROOT, 2, 0), (ROOT, 0, 1), (0, 1, 1)):
        builder.add(rows, torch.full_like(rows, parent), torch.full_like(rows, token), None, source=source)
    draft = builder.finish(Draw.DETERMINISTIC)
    check_integrity(draft)
    return draft


def test_draft_without_q_is_verified_by_naive() -> None:
    toy = Toy.random(5, 3, 3)

    def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = chosen_tree(toy, batch)
        return draft, VERIFICATIONS["naive"].verify(draft, toy.target(draft), noise)

    law = law_of(run, toy, 3)
    assert law.error < 1e-9
    assert law.accepted > 0


def test_draft_without_q_has_the_source_of_each_node() -> None:
    draft = chosen_tree(Toy.random(5, 3, 3), 1)
    assert [draft.sources[source] for source in draft.source[0].tolist()] == ["table", "luck", "luck"]


@pytest.mark.parametrize("rule", sorted(READS_Q.keys() - {"naive"}))
def test_rule_that_reads_q_refuses_draft_without_q(rule: str) -> None:
    toy = Toy.random(5, 3, 3)
    draft = chosen_tree(toy, 2)
    with pytest.raises(ValueError, match="without distributions"):
        VERIFICATIONS[rule].verify(draft, toy.target(draft), ForkingNoise([(), ()]))


def test_builder_mixes_sparse_draws_and_chosen_tokens() -> None:
    builder, row = TreeBuilder(1, 3, None), torch.tensor([0])
    places, q = builder.new_rows(1, 2, torch.float32, torch.tensor([[7, 4]]))
    q.copy_(torch.tensor([[0.75, 0.25]]))
    builder.add(row, torch.tensor([ROOT]), torch.tensor([1]), places, Draw.WITHOUT_REPLACEMENT)
    builder.add(row, torch.tensor([0]), torch.tensor([9]), None)
    draft = builder.finish(Draw.DETERMINISTIC)
    check_integrity(draft)
    assert draft.tokens.tolist() == [[4, 9]]
    assert draft.shares()[0, 0] == 0.25
    spread = draft.spread(draft.q_at(row, row), row, row, 10)
    assert spread.nonzero()[:, 1].tolist() == [4, 7]
    assert spread[0, [4, 7]].tolist() == [0.25, 0.75]
