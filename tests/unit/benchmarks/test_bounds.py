from __future__ import annotations

import itertools

import pytest
import torch
from scipy.optimize import linprog

from benchmarks.engine.bounds import greedy_acceptance, optimal_acceptance
from osd.drafting.growth import GROWTHS
from osd.verification import VERIFICATIONS
from osd.verification.tree import Draw
from tests.unit.verification.enumeration import Toy, law_of, step_of

DRAWS = [Draw.IID, Draw.WITHOUT_REPLACEMENT]


def draft_tuples(q: list[float], drafts: int, draw: Draw) -> dict[tuple[int, ...], float]:
    """Return the probability of every tuple of draft tokens."""
    probabilities = {}
    for drawn in itertools.product(range(len(q)), repeat=drafts):
        probability, rest = 1.0, 1.0
        for index, token in enumerate(drawn):
            if draw is Draw.WITHOUT_REPLACEMENT:
                probability *= q[token] / rest if token not in drawn[:index] else 0.0
                rest -= q[token]
            else:
                probability *= q[token]
        if probability:
            probabilities[drawn] = probability
    return probabilities


def by_linear_programme(p: list[float], q: list[float], drafts: int, draw: Draw) -> float:
    """Solve the optimal transport between target token and draft tuple directly."""
    drawn = draft_tuples(q, drafts, draw)
    pairs = [
        (i, t) for i in range(len(p)) for t, x in enumerate(drawn) if i in x
    ]  # pairs in which the token is among the drafts
    a = torch.zeros(len(p) + len(drawn), len(pairs), dtype=torch.float64)
    for column, (i, t) in enumerate(pairs):
        a[i, column] = a[len(p) + t, column] = 1.0
    return -linprog([-1.0] * len(pairs), A_ub=a.numpy(), b_ub=[*p, *drawn.values()], bounds=(0, None)).fun


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("vocabulary", "drafts"), [(2, 1), (3, 2), (5, 2), (4, 3), (5, 3)])
def test_optimal_acceptance_equals_linear_programme(vocabulary: int, drafts: int, draw: Draw) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    p, q = (torch.rand(12, vocabulary, dtype=torch.float64, generator=generator) ** 3 + 1e-3 for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    acceptance = optimal_acceptance(p, q, drafts, draw)
    for row in range(12):
        assert float(acceptance[row]) == pytest.approx(
            by_linear_programme(p[row].tolist(), q[row].tolist(), drafts, draw), abs=1e-8
        )


@pytest.mark.parametrize("drafts", [3, 4])
def test_optimal_acceptance_of_peaked_drafts_is_exact(drafts: int) -> None:
    q = torch.tensor([[0.9999, 9e-5, 9e-6, 9e-7, 1e-7]], dtype=torch.float64)
    q /= q.sum()
    p = torch.tensor([[0.2, 0.3, 0.3, 0.1, 0.1]], dtype=torch.float64)
    expected = by_linear_programme(p[0].tolist(), q[0].tolist(), drafts, Draw.WITHOUT_REPLACEMENT)
    assert float(optimal_acceptance(p, q, drafts, Draw.WITHOUT_REPLACEMENT)) == pytest.approx(expected, abs=1e-8)


def test_drafts_of_all_tokens_are_always_accepted() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    q = torch.tensor([[0.1, 0.2, 0.7, 0.0]])
    for drafts in (3, 4):
        assert float(optimal_acceptance(p, q, drafts, Draw.WITHOUT_REPLACEMENT)) == pytest.approx(1.0)
    certain = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert float(optimal_acceptance(p, certain, 2, Draw.WITHOUT_REPLACEMENT)) == pytest.approx(0.3)


RULES = [
    ("siblings", Draw.IID), ("k_seq", Draw.IID), ("naive", Draw.IID), ("traversal", Draw.IID),
    ("siblings", Draw.WITHOUT_REPLACEMENT), ("traversal", Draw.WITHOUT_REPLACEMENT),
    ("naive", Draw.WITHOUT_REPLACEMENT),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "draw"), RULES)
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_rule_accepts_at_most_the_bound(rule: str, draw: Draw, drafts: int) -> None:
    toy = Toy.random(drafts, 4, 2, agreement=0.2)
    growth = GROWTHS["static_tree"](paths=[(k,) for k in range(drafts)], draw=draw)
    accepted = law_of(step_of(growth, VERIFICATIONS[rule], toy), toy, 2).accepted
    bound = float(optimal_acceptance(toy.p[:1], toy.q[:1], drafts, draw))
    print(f"{rule} {draw.value} with {drafts}: {accepted:.4f} of {bound:.4f}")
    assert accepted <= bound + 1e-9
    if drafts == 1 and rule != "naive":
        assert accepted == pytest.approx(bound)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_greedy_multidraft_accepts_as_its_formula(drafts: int) -> None:
    toy = Toy.random(drafts, 4, 2, agreement=0.2)
    growth = GROWTHS["static_tree"](paths=[(k,) for k in range(drafts)], draw=Draw.TOP_THEN_DRAWN)
    accepted = law_of(step_of(growth, VERIFICATIONS["greedy_multidraft"], toy), toy, 2).accepted
    assert accepted == pytest.approx(float(greedy_acceptance(toy.p[:1], toy.q[:1], drafts)))


@pytest.mark.parametrize("draw", DRAWS)
def test_more_drafts_in_large_vocabulary_raise_acceptance(draw: Draw) -> None:
    p, q = (torch.randn(1, 50_000, generator=torch.Generator().manual_seed(s)).mul(3).softmax(-1) for s in (1, 2))
    rates = [float(optimal_acceptance(p, q, drafts, draw)) for drafts in (1, 2, 3, 4)]
    assert rates == sorted(rates)
