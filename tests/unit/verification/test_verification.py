"""Exact output laws of all rules with all growth policies, equal to the law of the target."""

from __future__ import annotations

import pytest
import torch

from osd.drafting.compatibility import check_compatible
from osd.drafting.growth import GROWTHS, DraftBudget, Growth
from osd.verification import VERIFICATIONS, Verdict
from osd.verification.base import residual
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import DraftBatch, Draw
from tests.unit.verification.enumeration import ForkingNoise, Law, Toy, law_of, plain_sampling, step_of

KINDS = {"dense": {}, "sparse": {"sparse": True}, "distant": {"agreement": 0.0}, "reduced": {"support": 2}}


def law(growth: Growth, rule: str, toy: Toy, length: int, limit: int = 1_000) -> Law:
    result = law_of(step_of(growth, VERIFICATIONS[rule], toy, limit), toy, length)
    print(f"{rule}: {result}")
    return result


def test_residual_without_mass_is_the_target() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]), torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.2, 0.2]])
    left, mass = residual(p, q)
    torch.testing.assert_close(left, torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(mass, torch.tensor([0.0, 0.4]))


@pytest.mark.parametrize(("depth", "kind"), [(1, "dense"), (2, "sparse"), (3, "distant"), (2, "reduced")])
@pytest.mark.parametrize("rule", ["chain", "block", "siblings", "traversal", "naive", "greedy_multidraft", "k_seq"])
def test_chains_are_verified_losslessly(rule: str, depth: int, kind: str) -> None:
    toy = Toy.random(depth, 3, depth + 1, **KINDS[kind])
    assert law(GROWTHS["chain"](depth), rule, toy, depth + 1).error < 1e-9


TREE_RULES = [
    ("siblings", Draw.IID), ("siblings", Draw.WITHOUT_REPLACEMENT), ("traversal", Draw.IID),
    ("traversal", Draw.WITHOUT_REPLACEMENT), ("naive", Draw.IID), ("naive", Draw.WITHOUT_REPLACEMENT),
    ("naive", Draw.DETERMINISTIC), ("naive", Draw.TOP_THEN_DRAWN), ("greedy_multidraft", Draw.TOP_THEN_DRAWN),
    ("greedy_multidraft", Draw.WITHOUT_REPLACEMENT), ("k_seq", Draw.IID),
]  # fmt: skip
SHAPES = {
    "triple": ([(0,), (1,), (2,)], "sparse"),
    "2x1": ([(0,), (1,), (0, 0), (1, 0)], "reduced"),
    "2x1 distant": ([(0,), (1,), (0, 0), (1, 0)], "distant"),
    "1x3": ([(0,), (0, 0), (0, 1), (0, 2)], "dense"),
    "lopsided": ([(0,), (1,), (1, 0), (1, 1)], "sparse"),
    "deep": ([(0,), (1,), (0, 0), (0, 0, 0)], "dense"),
}
PAIRS = GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
"""Two children, each with two children."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rule", "draw"), TREE_RULES)
def test_static_trees_are_verified_losslessly(rule: str, draw: Draw, shape: str) -> None:
    paths, kind = SHAPES[shape]
    depth = max(map(len, paths))
    toy = Toy.random(7, 3, depth + 1, **KINDS[kind])
    assert law(GROWTHS["static_tree"](paths=paths, draw=draw), rule, toy, depth + 1).error < 1e-9


GROWN = {
    "confidence": (GROWTHS["confidence"](eta=0.4, depth=3), "chain block siblings traversal naive k_seq", 3),
    "acceptance head": (GROWTHS["acceptance_head"](h=0.5, depth=3), "chain block siblings traversal naive k_seq", 3),
    "heuristic": (GROWTHS["heuristic"](start=2, depth=2), "chain block", 2),
    "dynamic budget": (GROWTHS["dynamic_tree"](budget=4), "siblings traversal naive", 3),
    "dynamic threshold": (GROWTHS["dynamic_tree"](budget=4, threshold=0.15), "siblings traversal naive", 3),
    "dynamic level cap": (GROWTHS["dynamic_tree"](budget=3, threshold=0.02), "siblings traversal naive", 3),
    "top k": (GROWTHS["top_k_tree"](budget=5, top_k=2, depth=3), "naive", 3),
    "sequoia": (GROWTHS["static_tree"](acceptance=[0.6, 0.3], budget=4, depth=3), "siblings traversal naive", 3),
    "pairs": (PAIRS, "siblings traversal", 2),
    "sparse": (GROWTHS["sparse_tree"]([[0.5, 0.3], [0.4]], budget=3), "naive", 2),
    "drawn sparse": (GROWTHS["sparse_tree"]([[0.5, 0.3], [0.4]], budget=3, draw="without_replacement"), "traversal", 2),
}


@pytest.mark.parametrize("kind", ["dense", "sparse", "reduced"])
@pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name, (_, rules, _) in GROWN.items() for rule in rules.split()]
)
def test_compatible_growth_and_rule_are_lossless(name: str, rule: str, kind: str) -> None:
    growth, _, depth = GROWN[name]
    check_compatible(growth, VERIFICATIONS[rule])
    toy = Toy.random(11, 3, depth + 1, **KINDS[kind])
    assert law(growth, rule, toy, depth + 1).error < 1e-9


@pytest.mark.parametrize(("rule", "growth"), [
    ("siblings", GROWTHS["static_tree"](paths=SHAPES["lopsided"][0])),
    ("traversal", GROWTHS["dynamic_tree"](budget=4)),
    ("greedy_multidraft", GROWTHS["static_tree"](paths=SHAPES["lopsided"][0], draw="top_then_drawn")),
])  # fmt: skip
def test_tree_cut_at_its_limit_is_lossless(rule: str, growth: Growth) -> None:
    assert law(growth, rule, Toy.random(12, 3, 3), 3, limit=3).error < 1e-9


@pytest.mark.parametrize("rule", list(VERIFICATIONS))
def test_empty_draft_gives_a_token_of_the_target(rule: str) -> None:
    toy = Toy.random(13, 4, 1)

    def plain(noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        draft = DraftBatch.empty(batch)
        return draft, VERIFICATIONS[rule].verify(draft, toy.p[:1].expand(batch, 1, -1), noise)

    assert law_of(plain, toy, 1).error < 1e-9


def test_block_and_traversal_accept_at_least_as_much() -> None:
    chain, tree = GROWTHS["chain"](3), GROWTHS["static_tree"](paths=SHAPES["deep"][0])
    gains = []
    for seed in range(4):
        toy = Toy.random(seed, 3, 4, agreement=0.2)
        gains.append(law(chain, "block", toy, 4).accepted - law(chain, "chain", toy, 4).accepted)
        gains.append(law(tree, "traversal", toy, 4).accepted - law(tree, "siblings", toy, 4).accepted)
        assert law(chain, "traversal", toy, 4).accepted == pytest.approx(law(chain, "block", toy, 4).accepted)
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_k_seq_accepts_perfect_drafts() -> None:
    toy = Toy.random(1, 3, 2)
    perfect = Toy(toy.p, toy.p, 3)
    result = law(GROWTHS["static_tree"](paths=[(0,), (1,)], draw="iid"), "k_seq", perfect, 2)
    assert result.accepted == pytest.approx(1.0, abs=1e-6)


def test_block_reaches_the_figure_of_its_paper() -> None:
    p, q = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64) / 3
    toy = Toy(p.expand(15, 2), q.expand(15, 2), 2)
    assert law(GROWTHS["chain"](2), "chain", toy, 3).accepted == pytest.approx(10 / 9)
    assert law(GROWTHS["chain"](2), "block", toy, 3).accepted == pytest.approx(11 / 9)


EVERY = [
    ("chain", GROWTHS["chain"](3)), ("block", GROWTHS["chain"](3)), ("siblings", GROWTHS["dynamic_tree"](budget=6)),
    ("siblings", GROWTHS["dynamic_tree"](budget=6, threshold=0.05)), ("traversal", GROWTHS["dynamic_tree"](budget=6)),
    ("naive", GROWTHS["top_k_tree"](budget=6, top_k=2)),
    ("greedy_multidraft", GROWTHS["static_tree"](paths=SHAPES["lopsided"][0], draw="top_then_drawn")),
    ("k_seq", GROWTHS["static_tree"](paths=SHAPES["lopsided"][0], draw="iid")),
    ("chain", GROWTHS["confidence"](eta=0.3, depth=3)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "growth"), EVERY)
def test_ragged_batch_equals_single_sequences(rule: str, growth: Growth) -> None:
    toy, count = Toy.random(14, 4, 5, agreement=0.6), 48
    noise = Noise(torch.arange(count), torch.arange(count) * 17, torch.zeros(count, dtype=torch.int64))
    limits = torch.arange(count) % 8
    draft = growth.grow(toy, plain_sampling(count), noise, DraftBudget(limits))
    assert (draft.sizes <= limits).all()
    assert int(draft.sizes.max()) > 2
    verdict = VERIFICATIONS[rule].verify(draft, toy.target(draft), noise)
    for row in range(count):
        row_noise = noise.rows(torch.tensor([row]))
        alone = growth.grow(toy, plain_sampling(1), row_noise, DraftBudget(limits[row : row + 1]))
        size = int(alone.sizes[0])
        assert alone.tokens[0].tolist() == draft.tokens[row, :size].tolist()
        assert size == int(draft.sizes[row])
        again = VERIFICATIONS[rule].verify(alone, toy.target(alone), row_noise)
        assert int(again.token[0]) == int(verdict.token[row])
        accepted = int(again.accepted[0])
        assert again.path[0, :accepted].tolist() == verdict.path[row, :accepted].tolist()
        assert accepted == int(verdict.accepted[row])
        assert (verdict.path[row, accepted:] == -1).all()


@pytest.mark.parametrize(("rule", "growth"), EVERY)
def test_greedy_output_is_the_target_argmax(rule: str, growth: Growth) -> None:
    toy, count = Toy.random(15, 5, 5, agreement=0.95), 64
    noise = Noise(torch.arange(count), torch.arange(count), torch.zeros(count, dtype=torch.int64))
    settings = SamplingBatch.of([SamplingParams(0.0)] * count)
    draft = growth.grow(toy, settings, noise, DraftBudget(torch.full((count,), 100)))
    p = toy.target(draft)
    p = settings.probabilities(p.log().flatten(0, 1), torch.arange(count).repeat_interleave(p.shape[1])).view_as(p)
    verdict = VERIFICATIONS[rule].verify(draft, p, noise)
    best = toy.p.argmax(-1)
    for row in range(count):
        code = 0
        path = verdict.path[row, : verdict.accepted[row]]
        for token in [*draft.tokens[row, path].tolist(), int(verdict.token[row])]:
            assert token == int(best[code])
            code = code * 5 + 1 + token
    assert float(verdict.accepted.double().mean()) > 0.5
