"""A growth policy that the house does not know: what one has to write, and that it is checked like any other."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from osd.speculation.compatibility import IncompatibleError, compatible
from osd.speculation.growth.base import DraftOutcome, Expander, Growth, expanded
from osd.speculation.noise import Noise, Purpose
from osd.speculation.sampling import SamplingBatch
from osd.speculation.tree import ROOT, DraftBatch, Draw, TreeBuilder
from osd.speculation.verification import VERIFICATIONS
from tests.unit.speculation.enumeration import Toy, law_of, round_of


class PairThenTwins(Growth):
    """Two different first tokens, and two draws that may be equal after the first of them."""

    name: ClassVar[str] = "pair_then_twins"
    draws = frozenset({Draw.WITHOUT_REPLACEMENT, Draw.IID})
    fixed_width = True
    max_nodes = 4

    def grow(self, expand: Expander, sampling: SamplingBatch, noise: Noise, limits: Tensor) -> DraftBatch:
        builder, rows = TreeBuilder(len(limits), 4, expand.support), (limits >= self.max_nodes).nonzero().squeeze(-1)
        for node, draw in ((ROOT, Draw.WITHOUT_REPLACEMENT), (0, Draw.IID)):
            parents = torch.full_like(rows, node)
            places, q, _ = expanded(builder, expand, sampling.for_trees(), rows, parents)
            left = q.clone()
            for child in range(2):
                drawn = noise.rows(rows).pick(left, Purpose.DRAFT, 2 * (node + 1) + child)
                if draw is Draw.WITHOUT_REPLACEMENT:
                    left[torch.arange(len(rows)), drawn] = 0.0
                builder.add(rows, parents, drawn, places, draw)
        return builder.finish(Draw.IID)


@pytest.mark.parametrize("rule", ["siblings", "traversal", "naive"])
def test_a_new_policy_is_lossless_with_every_rule_that_fits_all_its_draws(rule: str) -> None:
    growth, toy = PairThenTwins(), Toy.random(1, 3, 3, agreement=0.3)
    compatible(growth, VERIFICATIONS[rule])
    found = law_of(round_of(growth, VERIFICATIONS[rule], toy), toy, 3)
    assert found.error < 1e-9
    assert found.accepted > 0.5


@pytest.mark.parametrize(("rule", "reason"), [("k_seq", "without replacement"), ("greedy_multidraft", "with repl")])
def test_a_rule_that_fits_only_one_of_its_draws_is_refused(rule: str, reason: str) -> None:
    with pytest.raises(IncompatibleError, match=f"pair_then_twins draws siblings {reason}"):
        compatible(PairThenTwins(), VERIFICATIONS[rule])


def test_what_a_policy_does_not_say_is_what_most_do() -> None:
    growth = PairThenTwins()
    assert growth.first_limit == growth.next_limit(2, drafted=2, accepted=0) == 4
    assert growth.observe([DraftOutcome([ROOT], [0])], lambda together: {1: together}) is False
    assert growth.stops_above is None
