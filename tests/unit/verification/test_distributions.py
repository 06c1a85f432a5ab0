from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from osd.drafting.compatibility import IncompatibleError, check_compatible
from osd.drafting.growth import GROWTHS, DraftBudget
from osd.engine.request import SamplingParams
from osd.verification import VERIFICATIONS
from osd.verification.distributions import Probabilities
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import Draw
from tests.unit.verification.enumeration import Toy, plain_sampling

BATCH, WIDTH, VOCABULARY = 3, 4, 40
SETTINGS = [(0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.5, 0, 0.8, 0.05), (0.0, 0, 1.0, 0.0)]


def both(settings: list[tuple[float, int, float, float]]) -> tuple[Probabilities, Tensor, list[int]]:
    """Return lazy probabilities, eager probabilities, and the list of row counts of each lazy computation."""
    sampling = replace(SamplingBatch.of(SamplingParams(*values) for values in settings))  # not the cached batch
    logits = torch.randn(BATCH * WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(0))
    owners = torch.arange(BATCH).repeat_interleave(WIDTH)
    counts: list[int] = []
    eager = sampling.probabilities(logits, owners)
    whole = sampling.probabilities

    def counting(logits: Tensor, rows: Tensor, out: Tensor) -> Tensor:
        counts.append(len(logits))
        return whole(logits, rows, out=out)

    object.__setattr__(sampling, "probabilities", counting)
    places = torch.arange(BATCH * WIDTH).view(BATCH, WIDTH)
    return Probabilities(logits, owners, places, sampling), eager.view(BATCH, WIDTH, VOCABULARY), counts


@pytest.mark.parametrize("first", range(4))
def test_lazy_distributions_equal_eager_distributions(first: int) -> None:
    lazy, eager, _ = both((SETTINGS + SETTINGS)[first : first + BATCH])
    assert lazy.shape == eager.shape
    assert lazy.dtype == eager.dtype
    rows, nodes, tokens = torch.tensor([2, 0, 2]), torch.tensor([3, 1, 0]), torch.tensor([7, 39, 0])
    torch.testing.assert_close(lazy[rows, nodes, tokens], eager[rows, nodes, tokens], rtol=0, atol=0)
    torch.testing.assert_close(lazy[rows, nodes], eager[rows, nodes], rtol=0, atol=0)
    every = torch.arange(BATCH)[:, None], torch.arange(WIDTH)
    torch.testing.assert_close(lazy[every], eager, rtol=0, atol=0)


def test_lazy_row_is_computed_once_at_its_first_use() -> None:
    lazy, _, counts = both(SETTINGS[:BATCH])
    rows, nodes = torch.tensor([2, 0, 2]), torch.tensor([3, 1, 3])
    lazy[rows, nodes, torch.zeros_like(rows)]
    assert counts == [2]
    lazy[rows, nodes]
    assert counts == [2]
    lazy[torch.arange(BATCH), torch.ones(BATCH, dtype=torch.int64)]
    assert counts == [2, 2]


PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
GROWN = [
    GROWTHS["chain"](depth=4),
    GROWTHS["dynamic_tree"](budget=6),
    GROWTHS["top_k_tree"](budget=6, top_k=2),
    *(GROWTHS["static_tree"](paths=PATHS, draw=draw) for draw in (Draw.IID, Draw.TOP_THEN_DRAWN)),
]


@pytest.mark.parametrize("rule", VERIFICATIONS.values(), ids=VERIFICATIONS)
def test_rule_decides_equally_on_lazy_distributions(rule) -> None:
    toy, count, tried = Toy.random(3, 4, 7, agreement=0.6), 64, 0
    noise = Noise(torch.arange(count), torch.arange(count), torch.zeros(count, dtype=torch.int64))
    for growth in GROWN:
        try:
            check_compatible(growth, rule)
        except IncompatibleError:
            continue
        tried += 1
        draft = growth.grow(toy, plain_sampling(count), noise, DraftBudget(torch.arange(count) % 7))
        p = toy.target(draft)
        owners, places = torch.arange(count).repeat_interleave(p.shape[1]), torch.arange(p[..., 0].numel())
        sampling = plain_sampling(count)
        logits = p.log().flatten(0, 1)
        eager = rule.verify(draft, sampling.probabilities(logits, owners).view_as(p), noise)
        lazy = rule.verify(draft, Probabilities(logits, owners, places.view(p.shape[:2]), sampling), noise)
        assert torch.equal(lazy.path, eager.path)
        assert torch.equal(lazy.accepted, eager.accepted)
        assert torch.equal(lazy.token, eager.token)
        assert int(lazy.accepted.sum()) > count / 4
    assert tried
