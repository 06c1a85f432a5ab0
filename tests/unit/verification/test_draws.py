"""Drafts whose distributions are sparse, or missing, and trees whose siblings are drawn in several ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from osd.drafting.compatibility import IncompatibleError, compatible
from osd.drafting.growth import GROWTHS, Budget, DraftOutcome, Growth, Source
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
    """A drafter that thinks of two tokens after each history; those of a vocabulary of its own when ``support``."""
    toy = Toy.random(seed, 4 if support else 3, 3, agreement=0.2, support=support)
    best = toy.q.topk(2)
    q = torch.zeros_like(toy.q).scatter_(1, best.indices, best.values)
    return replace(toy, q=q / q.sum(-1, keepdim=True))


def sparse(draft: DraftBatch, kept: int) -> DraftBatch:
    """The same draft, with the ``kept`` most probable tokens of each distribution alone."""
    assert draft.q is not None
    best = draft.q.topk(kept)
    columns = (best.indices[draft.q_row] == draft.columns[:, :, None]).long().argmax(-1)
    ids = best.indices if draft.support is None else draft.support[best.indices]
    return replace(draft, q=best.values, q_ids=ids, columns=columns)


@pytest.mark.parametrize("support", [0, 3])
@pytest.mark.parametrize("rule", READS_Q)
def test_a_sparse_distribution_gives_the_law_of_the_dense_one(rule: str, support: int) -> None:
    toy, growth = narrow(3, support), READS_Q[rule]

    def law(kept: int, exchanged: bool = False) -> Law:
        def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
            draft = growth.grow(toy, plain_sampling(batch), noise, Budget(torch.full((batch,), growth.max_nodes)))
            draft = sparse(draft, kept) if kept else draft
            check_integrity(draft)
            draft = replace(draft, q=draft.q.flip(1)) if exchanged else draft  # type: ignore[union-attr]
            return draft, VERIFICATIONS[rule].verify(draft, toy.target(draft), noise)

        return law_of(run, toy, 3)

    dense = law(0)
    for found in (law(2), law(3)):  # the third token has probability 0
        assert found.error < 1e-9
        assert found.accepted == pytest.approx(dense.accepted, abs=1e-12)
    if rule != "naive":
        assert law(2, exchanged=True).error > 1e-5


class InSeveralWays(Growth):
    """Two children of the root drawn in one way, and two of the first of these in another; the house knows no such."""

    name = "in_several_ways"
    fixed_width = True
    max_nodes = 4

    def __init__(self, above: Draw, below: Draw) -> None:
        self.ways, self.draws = (above, below), frozenset({above, below})

    def grow(self, source: Source, sampling: SamplingBatch, noise: Noise, budget: Budget) -> DraftBatch:
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


def error(growth: Growth, rule: str, said: Draw | None = None) -> float:
    return largest_error(
        growth, VERIFICATIONS[rule].verify, lambda draft: draft if said is None else as_if(draft, said)
    )


@pytest.mark.parametrize("ways", [(Draw.IID, Draw.WITHOUT_REPLACEMENT), (Draw.WITHOUT_REPLACEMENT, Draw.IID)])
@pytest.mark.parametrize("rule", ["siblings", "traversal", "naive"])
def test_siblings_of_one_tree_may_be_drawn_in_different_ways(rule: str, ways: tuple[Draw, Draw]) -> None:
    growth = InSeveralWays(*ways)
    compatible(growth, VERIFICATIONS[rule])
    assert error(growth, rule) < 1e-9
    for said in ways if rule != "naive" else ():  # one way for the whole tree is wrong about half of it
        assert error(growth, rule, said) > 1e-3


@pytest.mark.parametrize(("rule", "reason"), [("k_seq", "without replacement"), ("greedy_multidraft", "with repl")])
def test_a_rule_that_fits_only_one_of_the_draws_is_refused(rule: str, reason: str) -> None:
    with pytest.raises(IncompatibleError, match=f"in_several_ways draws siblings {reason}"):
        compatible(InSeveralWays(Draw.WITHOUT_REPLACEMENT, Draw.IID), VERIFICATIONS[rule])


def test_what_a_policy_does_not_say_is_what_most_do() -> None:
    growth = InSeveralWays(Draw.IID, Draw.IID)
    assert growth.first_limit == growth.next_limit(2, drafted=2, accepted=0) == 4
    assert growth.observe([DraftOutcome([ROOT], [0])], lambda together: {1: together}) is False
    assert growth.stop is None


def looked_up(toy: Toy, batch: int) -> DraftBatch:
    """Two tokens after the root and one below the first of them, chosen by nobody's chance."""
    builder, rows = TreeBuilder(batch, 3, None, sources=("table", "luck")), torch.arange(batch)
    for parent, token, source in ((ROOT, 2, 0), (ROOT, 0, 1), (0, 1, 1)):
        builder.add(rows, torch.full_like(rows, parent), torch.full_like(rows, token), None, source=source)
    draft = builder.finish(Draw.DETERMINISTIC)
    check_integrity(draft)
    return draft


def test_a_draft_without_distributions_is_verified_by_looking_it_up() -> None:
    toy = Toy.random(5, 3, 3)

    def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = looked_up(toy, batch)
        return draft, VERIFICATIONS["naive"].verify(draft, toy.target(draft), noise)

    found = law_of(run, toy, 3)
    assert found.error < 1e-9
    assert found.accepted > 0


def test_a_draft_without_distributions_says_who_proposed_what() -> None:
    draft = looked_up(Toy.random(5, 3, 3), 1)
    assert [draft.sources[source] for source in draft.source[0].tolist()] == ["table", "luck", "luck"]


@pytest.mark.parametrize("rule", sorted(READS_Q.keys() - {"naive"}))
def test_a_rule_that_needs_distributions_refuses_a_draft_without(rule: str) -> None:
    toy = Toy.random(5, 3, 3)
    draft = looked_up(toy, 2)
    with pytest.raises(ValueError, match="without distributions"):
        VERIFICATIONS[rule].verify(draft, toy.target(draft), ForkingNoise([(), ()]))  # type: ignore[arg-type]


def test_a_builder_keeps_ids_of_sparse_distributions_beside_tokens_that_were_not_drawn() -> None:
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
