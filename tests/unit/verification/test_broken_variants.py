"""What must not be done: each mistake biases the output, and the enumeration that the rules pass shows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from osd.drafting.growth import GROWTHS, Budget, Growth
from osd.verification import VERIFICATIONS, Verdict
from osd.verification.noise import Purpose
from osd.verification.tree import DraftBatch, Draw
from tests.unit.verification.enumeration import (
    ForkingNoise,
    Toy,
    as_if,
    largest_error,
    law_of,
    plain_sampling,
    round_of,
)

PAIR = GROWTHS["static_tree"](paths=[(0,), (1,)])
TOP_PAIR = GROWTHS["static_tree"](paths=[(0,), (1,)], draw=Draw.DETERMINISTIC)
TWINS = GROWTHS["static_tree"](paths=[(0,), (1,)], draw=Draw.IID)
CHAIN = GROWTHS["chain"](2)
Spoil = Callable[[DraftBatch], DraftBatch]
Outcome = tuple[DraftBatch, Verdict]


def error(growth: Growth, rule: str, spoil: Spoil) -> float:
    return largest_error(growth, VERIFICATIONS[rule].verify, spoil)


def reorder(draft: DraftBatch, order: Tensor) -> DraftBatch:
    return replace(draft, tokens=draft.tokens.gather(1, order), columns=draft.columns.gather(1, order))


def keep(draft: DraftBatch, count: Tensor) -> DraftBatch:
    return replace(draft, sizes=count)


@pytest.mark.parametrize("rule", ["siblings", "traversal"])
def test_siblings_as_drawn_pass(rule: str) -> None:
    assert error(PAIR, rule, lambda draft: draft) < 1e-9


@pytest.mark.parametrize("rule", ["siblings", "traversal"])
def test_siblings_verified_in_reverse_order_are_caught(rule: str) -> None:
    assert error(PAIR, rule, lambda draft: reorder(draft, torch.tensor([[1, 0]]).expand_as(draft.tokens))) > 1e-3


@pytest.mark.parametrize("rule", ["siblings", "traversal"])
def test_siblings_sorted_by_probability_are_caught(rule: str) -> None:
    assert error(PAIR, rule, lambda draft: reorder(draft, draft.shares().argsort(1, descending=True))) > 1e-3


@pytest.mark.parametrize("rule", ["siblings", "traversal", "k_seq"])
def test_siblings_drawn_without_replacement_and_verified_with_q_as_it_was_are_caught(rule: str) -> None:
    assert error(PAIR, rule, lambda draft: as_if(draft, Draw.IID)) > 1e-3


@pytest.mark.parametrize("rule", ["siblings", "traversal"])
def test_the_most_probable_tokens_verified_as_if_they_had_been_drawn_are_caught(rule: str) -> None:
    assert error(TOP_PAIR, rule, lambda draft: as_if(draft, Draw.WITHOUT_REPLACEMENT)) > 1e-3


@pytest.mark.parametrize("rule", ["siblings", "traversal"])
def test_dropping_the_smaller_of_two_drawn_siblings_is_caught(rule: str) -> None:
    def drop(draft: DraftBatch) -> DraftBatch:
        return keep(reorder(draft, draft.shares().argsort(1, descending=True)), torch.ones_like(draft.sizes))

    assert error(PAIR, rule, drop) > 1e-3


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_dropping_a_last_token_of_low_confidence_is_caught_and_keeping_it_passes(rule: str) -> None:
    assert error(CHAIN, rule, lambda draft: keep(draft, 1 + (draft.shares()[:, 1] > 0.4).long())) > 1e-3
    assert error(GROWTHS["confidence"](eta=0.4, depth=2), rule, lambda draft: draft) < 1e-9


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_dropping_a_last_token_that_the_head_doubts_is_caught(rule: str) -> None:
    def drop(draft: DraftBatch) -> DraftBatch:
        last = Toy.random(0, 3, 3).codes(draft.tokens, draft.parents)[:, 1]  # the head has read the last token as well
        return keep(draft, 1 + ((last * 0.6180339887) % 1 > 0.5).long())

    assert error(CHAIN, rule, drop) > 1e-3
    assert error(GROWTHS["acceptance_head"](h=0.5, depth=3), rule, lambda draft: draft) < 1e-9


def test_a_second_sibling_that_depends_on_the_first_is_caught_where_the_width_must_be_fixed() -> None:
    def adapt(draft: DraftBatch) -> DraftBatch:
        return keep(draft, 1 + (draft.shares()[:, 0] < 0.4).long())

    assert error(TWINS, "siblings", adapt) < 1e-9
    assert error(TWINS, "k_seq", adapt) > 1e-3
    assert error(PAIR, "siblings", adapt) < 1e-9
    assert error(PAIR, "greedy_multidraft", adapt) > 1e-3


def test_greedy_multidraft_with_a_last_child_that_was_not_drawn_is_caught() -> None:
    assert error(TOP_PAIR, "greedy_multidraft", lambda draft: draft) > 1e-3


class Shared(ForkingNoise):
    """Noise that gives two purposes the same number."""

    purposes: tuple[Purpose, Purpose]

    def key(self, purpose: Purpose, index: int) -> tuple[int, int]:
        return int(self.purposes[0] if purpose is self.purposes[1] else purpose), index


@pytest.mark.parametrize("purposes", [
    (Purpose.DRAFT, Purpose.ACCEPT), (Purpose.DRAFT, Purpose.RESIDUAL), (Purpose.ACCEPT, Purpose.RESIDUAL),
])  # fmt: skip
def test_a_key_that_two_purposes_share_is_caught(purposes: tuple[Purpose, Purpose]) -> None:
    kind = type("SharedKey", (Shared,), {"purposes": purposes})
    worst = 0.0
    for seed in range(4):
        toy = Toy.random(seed, 3, 2, agreement=0.2)
        run = round_of(GROWTHS["chain"](1), VERIFICATIONS["chain"], toy)
        worst = max(worst, law_of(run, toy, 2, kind).error)
    print(f"{purposes}: largest error {worst:.3g}")
    assert worst > 1e-3


def test_a_bonus_token_drawn_from_the_drafter_is_caught() -> None:
    toy = Toy.random(0, 3, 2, agreement=0.2)

    def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = GROWTHS["chain"](1).grow(
            toy, plain_sampling(batch), noise, Budget(torch.ones(batch, dtype=torch.int64))
        )
        p = toy.target(draft)
        p[:, 1] = toy.q[toy.codes(draft.tokens, draft.parents)[:, 0]]
        return draft, VERIFICATIONS["chain"].verify(draft, p, noise)

    assert law_of(run, toy, 2).error > 1e-3


@pytest.mark.parametrize("rule", ["siblings", "traversal"])
def test_siblings_drawn_with_replacement_and_verified_as_without_are_caught(rule: str) -> None:
    assert error(TWINS, rule, lambda draft: draft) < 1e-9
    assert error(TWINS, rule, lambda draft: as_if(draft, Draw.WITHOUT_REPLACEMENT)) > 1e-3


@pytest.mark.parametrize("rule", ["siblings", "traversal", "k_seq"])
def test_dropping_a_sibling_because_it_was_drawn_before_is_caught(rule: str) -> None:
    def merge(draft: DraftBatch) -> DraftBatch:
        return keep(draft, 1 + (draft.tokens[:, 0] != draft.tokens[:, 1]).long())

    assert error(TWINS, rule, merge) > 1e-3


def test_a_prune_that_seldom_happens_is_caught() -> None:
    assert 1e-4 < error(PAIR, "siblings", lambda draft: keep(draft, 2 - (draft.shares()[:, 1] < 0.04).long())) < 0.05


READS_Q = {
    "chain": CHAIN,
    "block": CHAIN,
    "siblings": PAIR,
    "traversal": PAIR,
    "k_seq": TWINS,
    "greedy_multidraft": GROWTHS["static_tree"](paths=[(0,), (1,)], draw=Draw.TOP_THEN_DRAWN),
}
"""Every rule that reads q, with drafts for it."""


@pytest.mark.parametrize("rule", READS_Q)
def test_a_q_that_was_rounded_after_the_draw_is_caught(rule: str) -> None:
    assert error(READS_Q[rule], rule, lambda draft: draft) < 1e-9
    assert error(READS_Q[rule], rule, lambda draft: replace(draft, q=draft.q.bfloat16().double())) > 1e-5


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_the_most_probable_token_verified_as_if_it_had_been_drawn_is_caught(rule: str) -> None:
    argmax = GROWTHS["static_tree"](paths=[(0,)], draw=Draw.DETERMINISTIC)
    assert error(argmax, rule, lambda draft: draft) > 1e-3


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_a_drafter_that_ignores_a_token_passes_and_a_q_that_heeds_it_is_caught(rule: str) -> None:
    worst = {"same": 0.0, "other": 0.0}
    for seed, kind in itertools.product(range(4), worst):
        toy = Toy.random(seed, 3, 3, agreement=0.2)
        blind = replace(toy, q=torch.cat([toy.q[:1], toy.q[1:2].expand(3, -1), toy.q[4:]]))

        def run(noise: ForkingNoise, batch: int, toy: Toy = toy, blind: Toy = blind, kind: str = kind) -> Outcome:
            draft = CHAIN.grow(blind, plain_sampling(batch), noise, Budget(torch.full((batch,), 2)))
            if kind == "other":
                q = draft.q.clone()
                q[draft.q_row[:, 1]] = toy.q[toy.codes(draft.tokens, draft.parents)[:, 0]]
                draft = replace(draft, q=q)
            return draft, VERIFICATIONS[rule].verify(draft, toy.target(draft), noise)

        worst[kind] = max(worst[kind], law_of(run, toy, 3).error)
    print(f"{rule}: largest errors {worst}")
    assert worst["same"] < 1e-9
    assert worst["other"] > 1e-3


def typical(draft: DraftBatch, p: Tensor, noise: ForkingNoise) -> Verdict:
    """Medusa's acceptance: keep a token of p above min(0.09, 0.3 exp(-entropy)), whatever q is."""
    rows, index = torch.arange(len(p)), torch.arange(draft.tokens.shape[1])
    least = (0.3 * torch.exp(torch.xlogy(p, p).sum(-1))).clamp(max=0.09)[:, :-1]  # [B, N]
    keep = p[rows[:, None], index, draft.tokens] > least
    accepted = keep.long().cumprod(-1).sum(-1)
    token = noise.pick(p[rows, accepted], Purpose.BONUS, accepted)
    return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)


def ensemble(draft: DraftBatch, p: Tensor, noise: ForkingNoise) -> Verdict:
    """The drafter has a say in what is kept."""
    mixed = 0.9 * p
    mixed[:, :-1] += 0.1 * draft.q[draft.q_row]
    return VERIFICATIONS["chain"].verify(draft, mixed / mixed.sum(-1, keepdim=True), noise)  # type: ignore[arg-type]


@pytest.mark.parametrize("verify", [typical, ensemble])
def test_rules_that_are_known_to_be_biased_are_caught(
    verify: Callable[[DraftBatch, Tensor, ForkingNoise], Verdict],
) -> None:
    assert largest_error(CHAIN, verify, lambda draft: draft) > 1e-3


class Coarse(ForkingNoise):
    """Acceptance by a uniform number of four decimals."""

    def accept(self, probability: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        return super().accept((probability * 10_000).ceil() / 10_000, purpose, index)


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_a_uniform_number_of_four_decimals_is_caught(rule: str) -> None:
    toy = Toy.random(0, 3, 3, agreement=0.2)
    run = round_of(CHAIN, VERIFICATIONS[rule], toy)
    assert law_of(run, toy, 3).error < 1e-9
    assert law_of(run, toy, 3, Coarse).error > 1e-7
