"""Mistakes that bias the output: the enumeration, which all rules pass, detects each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from osd.drafting.growth import GROWTHS, DraftBudget, Growth
from osd.verification import VERIFICATIONS, Verdict
from osd.verification.noise import Purpose
from osd.verification.tree import DraftBatch, Draw
from tests.unit.verification.enumeration import ForkingNoise, Toy, as_if, largest_error, law_of, plain_sampling, step_of

PAIR = GROWTHS["static_tree"](paths=[(0,), (1,)])
TOP_PAIR = GROWTHS["static_tree"](paths=[(0,), (1,)], draw=Draw.DETERMINISTIC)
TWINS = GROWTHS["static_tree"](paths=[(0,), (1,)], draw=Draw.IID)
TOP = GROWTHS["static_tree"](paths=[(0,)], draw=Draw.DETERMINISTIC)
CHAIN = GROWTHS["chain"](2)
Spoil = Callable[[DraftBatch], DraftBatch]
Outcome = tuple[DraftBatch, Verdict]


def error(growth: Growth, rule: str, spoil: Spoil) -> float:
    return largest_error(growth, VERIFICATIONS[rule].verify, spoil)


def reorder(draft: DraftBatch, order: Tensor) -> DraftBatch:
    return replace(draft, tokens=draft.tokens.gather(1, order), columns=draft.columns.gather(1, order))


def keep(draft: DraftBatch, count: Tensor) -> DraftBatch:
    return replace(draft, sizes=count)


def most_probable_first(draft: DraftBatch) -> DraftBatch:
    return reorder(draft, draft.shares().argsort(1, descending=True))


def as_drawn(draft: DraftBatch) -> DraftBatch:
    return draft


SIBLINGS = "siblings traversal"
MISTAKES: dict[str, tuple[Growth, str, Spoil]] = {
    "siblings in reverse order": (
        PAIR,
        SIBLINGS,
        lambda draft: reorder(draft, 1 - torch.arange(2).expand_as(draft.tokens)),
    ),
    "siblings sorted by probability": (PAIR, SIBLINGS, most_probable_first),
    "less probable sibling dropped": (PAIR, SIBLINGS, lambda draft: keep(most_probable_first(draft), draft.sizes // 2)),
    "draws without replacement as iid": (PAIR, f"{SIBLINGS} k_seq", lambda draft: as_if(draft, Draw.IID)),
    "most probable siblings as draws": (TOP_PAIR, SIBLINGS, lambda draft: as_if(draft, Draw.WITHOUT_REPLACEMENT)),
    "duplicate sibling dropped": (
        TWINS,
        f"{SIBLINGS} k_seq",
        lambda draft: keep(draft, 1 + (draft.tokens[:, 0] != draft.tokens[:, 1]).long()),
    ),
    "most probable token as a draw": (TOP, "chain block", as_drawn),
    "no drawn child": (TOP_PAIR, "greedy_multidraft", as_drawn),
}


@pytest.mark.parametrize(
    ("mistake", "rule"), [(name, rule) for name, (_, rules, _) in MISTAKES.items() for rule in rules.split()]
)
def test_mistake_is_caught(mistake: str, rule: str) -> None:
    growth, _, spoil = MISTAKES[mistake]
    assert error(growth, rule, spoil) > 1e-3


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_dropped_last_token_of_low_confidence_is_caught(rule: str) -> None:
    assert error(CHAIN, rule, lambda draft: keep(draft, 1 + (draft.shares()[:, 1] > 0.4).long())) > 1e-3
    assert error(GROWTHS["confidence"](eta=0.4, depth=2), rule, lambda draft: draft) < 1e-9


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_dropped_last_token_of_low_head_score_is_caught(rule: str) -> None:
    def drop(draft: DraftBatch) -> DraftBatch:
        last = Toy.random(0, 3, 3).codes(draft.tokens, draft.parents)[:, 1]  # the history includes the last token
        return keep(draft, 1 + ((last * 0.6180339887) % 1 > 0.5).long())

    assert error(CHAIN, rule, drop) > 1e-3
    assert error(GROWTHS["acceptance_head"](h=0.5, depth=3), rule, lambda draft: draft) < 1e-9


def test_width_that_depends_on_the_first_token_is_caught() -> None:
    def adapt(draft: DraftBatch) -> DraftBatch:
        return keep(draft, 1 + (draft.shares()[:, 0] < 0.4).long())

    assert error(TWINS, "siblings", adapt) < 1e-9
    assert error(TWINS, "k_seq", adapt) > 1e-3
    assert error(PAIR, "siblings", adapt) < 1e-9
    assert error(PAIR, "greedy_multidraft", adapt) > 1e-3


class Shared(ForkingNoise):
    """Noise with the same numbers for two purposes."""

    purposes: tuple[Purpose, Purpose]

    def key(self, purpose: Purpose, index: int) -> tuple[int, int]:
        return int(self.purposes[0] if purpose is self.purposes[1] else purpose), index


@pytest.mark.parametrize("purposes", [
    (Purpose.DRAFT, Purpose.ACCEPT), (Purpose.DRAFT, Purpose.RESIDUAL), (Purpose.ACCEPT, Purpose.RESIDUAL),
])  # fmt: skip
def test_key_of_two_purposes_is_caught(purposes: tuple[Purpose, Purpose]) -> None:
    kind = type("SharedKey", (Shared,), {"purposes": purposes})
    worst = 0.0
    for seed in range(4):
        toy = Toy.random(seed, 3, 2, agreement=0.2)
        step = step_of(GROWTHS["chain"](1), VERIFICATIONS["chain"], toy)
        worst = max(worst, law_of(step, toy, 2, kind).error)
    print(f"{purposes}: largest error {worst:.3g}")
    assert worst > 1e-3


def test_bonus_token_of_the_drafter_is_caught() -> None:
    toy = Toy.random(0, 3, 2, agreement=0.2)

    def run(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = GROWTHS["chain"](1).grow(
            toy, plain_sampling(batch), noise, DraftBudget(torch.ones(batch, dtype=torch.int64))
        )
        p = toy.target(draft)
        p[:, 1] = toy.q[toy.codes(draft.tokens, draft.parents)[:, 0]]
        return draft, VERIFICATIONS["chain"].verify(draft, p, noise)

    assert law_of(run, toy, 2).error > 1e-3


@pytest.mark.parametrize("rule", ["siblings", "traversal"])
def test_iid_draws_as_without_replacement_are_caught(rule: str) -> None:
    assert error(TWINS, rule, lambda draft: draft) < 1e-9
    assert error(TWINS, rule, lambda draft: as_if(draft, Draw.WITHOUT_REPLACEMENT)) > 1e-3


def test_rare_pruning_is_caught() -> None:
    assert 1e-4 < error(PAIR, "siblings", lambda draft: keep(draft, 2 - (draft.shares()[:, 1] < 0.04).long())) < 0.05


READS_Q = {
    "chain": CHAIN, "block": CHAIN, "siblings": PAIR, "traversal": PAIR, "k_seq": TWINS,
    "greedy_multidraft": GROWTHS["static_tree"](paths=[(0,), (1,)], draw=Draw.TOP_THEN_DRAWN),
}  # fmt: skip
"""Rules that read q, with fitting drafts."""


@pytest.mark.parametrize("rule", READS_Q)
def test_q_rounded_after_the_draw_is_caught(rule: str) -> None:
    assert error(READS_Q[rule], rule, lambda draft: draft) < 1e-9
    assert error(READS_Q[rule], rule, lambda draft: replace(draft, q=draft.q.bfloat16().double())) > 1e-5


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_q_of_another_context_is_caught(rule: str) -> None:
    """A drafter that ignores a token passes; a q that depends on this token is not the q of the draw."""
    worst = {"same": 0.0, "other": 0.0}
    for seed, kind in itertools.product(range(4), worst):
        toy = Toy.random(seed, 3, 3, agreement=0.2)
        blind = replace(toy, q=torch.cat([toy.q[:1], toy.q[1:2].expand(3, -1), toy.q[4:]]))

        def run(noise: ForkingNoise, batch: int, toy: Toy = toy, blind: Toy = blind, kind: str = kind) -> Outcome:
            draft = CHAIN.grow(blind, plain_sampling(batch), noise, DraftBudget(torch.full((batch,), 2)))
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
    """Verify as Medusa: accept a token with p above min(0.09, 0.3 exp(-entropy)), for any q."""
    rows, index = torch.arange(len(p)), torch.arange(draft.tokens.shape[1])
    least = (0.3 * torch.exp(torch.xlogy(p, p).sum(-1))).clamp(max=0.09)[:, :-1]  # [B, N]
    keep = p[rows[:, None], index, draft.tokens] > least
    accepted = keep.long().cumprod(-1).sum(-1)
    token = noise.pick(p[rows, accepted], Purpose.BONUS, accepted)
    return Verdict(torch.where(index < accepted[:, None], index, -1), accepted, token)


def ensemble(draft: DraftBatch, p: Tensor, noise: ForkingNoise) -> Verdict:
    """Verify by a mixture of p and q."""
    mixed = 0.9 * p
    mixed[:, :-1] += 0.1 * draft.q[draft.q_row]
    return VERIFICATIONS["chain"].verify(draft, mixed / mixed.sum(-1, keepdim=True), noise)


@pytest.mark.parametrize("verify", [typical, ensemble])
def test_biased_rules_of_the_literature_are_caught(verify: Callable[[DraftBatch, Tensor, ForkingNoise], Verdict]):
    assert largest_error(CHAIN, verify, lambda draft: draft) > 1e-3


class Coarse(ForkingNoise):
    """Noise whose uniform numbers have four decimals in ``accept``."""

    def accept(self, probability: Tensor, purpose: Purpose, index: Tensor | int) -> Tensor:
        return super().accept((probability * 10_000).ceil() / 10_000, purpose, index)


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_uniform_number_of_four_decimals_is_caught(rule: str) -> None:
    toy = Toy.random(0, 3, 3, agreement=0.2)
    step = step_of(CHAIN, VERIFICATIONS[rule], toy)
    assert law_of(step, toy, 3).error < 1e-9
    assert law_of(step, toy, 3, Coarse).error > 1e-7
