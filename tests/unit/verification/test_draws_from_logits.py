"""The C kernel that verifies by draws: compared with the rule ``naive``, and by its output law."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from osd.engine.request import SamplingParams
from osd.runtime.native import libraries, load, readable
from osd.verification.descent import NaiveRule
from osd.verification.draws import DrawnChildren, VerificationBatch, follow_draws, is_softmax
from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import DraftBatch

PARENTS = [-1, -1, 0, 0, 1, 2, 2]


@pytest.fixture(params=libraries(), ids=lambda path: Path(path).name.split(".")[0], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use each library that this CPU can run in turn."""
    loaded = load(request.param)
    monkeypatch.setattr("osd.verification.draws.kernels", lambda: loaded)


def drafts(count: int, generator: torch.Generator) -> list[tuple[list[int], list[int]]]:
    """Return trees of 0 to 7 nodes without duplicate tokens under a parent."""
    tokens = [torch.randperm(7, generator=generator).tolist() for _ in range(count)]
    return [(ids[: row % 8], PARENTS[: row % 8]) for row, ids in enumerate(tokens)]


@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
@pytest.mark.parametrize("by_place", [False, True])
def test_kernel_accepts_the_paths_of_naive(vocabulary: int, by_place: bool) -> None:
    generator, count = torch.Generator().manual_seed(vocabulary), 400
    trees = drafts(count, generator)
    kinds = [(1.0, 0.0), (0.4, 0.0), (2.0, 0.0), (1.0, 0.2)]
    settings = [
        SamplingParams(kinds[row % 4][0], min_p=kinds[row % 4][1], seed=row - 5, repeatable=by_place)
        for row in range(count)
    ]
    steps, lengths = [row % 3 for row in range(count)], [row * 3 for row in range(count)]
    rows = [1 + len(tokens) for tokens, _ in trees]
    logits = torch.randn(sum(rows), vocabulary, generator=generator)
    logits[:, :7] += math.log(vocabulary)  # so that drafts are accepted
    logits[:, 3] = -torch.inf
    p = SamplingBatch.of(settings).probabilities(logits, torch.arange(count).repeat_interleave(torch.tensor(rows)))
    whole = pad_sequence(list(p.split(rows)), batch_first=True)
    seeds, zeros = [sampling.seed for sampling in settings], [0] * count
    noise = Noise.of_seeds(seeds, zeros if by_place else steps, torch.device("cpu"))
    goal = NaiveRule().verify(DraftBatch.chosen(trees), whole, noise, torch.tensor(lengths) * by_place)
    every = follow_draws(logits, VerificationBatch(trees, settings, steps, lengths, NaiveRule()), range(count))
    assert list(every) == list(range(count))
    accepted = list(every.values())
    assert [token for _, token in accepted] == goal.token.tolist()
    kept = [path[:size] for path, size in zip(goal.path.tolist(), goal.accepted.tolist(), strict=True)]
    assert [path for path, _ in accepted] == kept
    assert sum(map(len, kept)) > count / 10


@pytest.mark.parametrize("vocabulary", [9, 700])
def test_kernel_draws_tokens_by_their_probability(vocabulary: int) -> None:
    runs = 8000
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1))
    logits[0, 2] = -torch.inf
    settings = [SamplingParams(0.7, seed=seed) for seed in range(runs)]
    drafted = VerificationBatch([([], [])] * runs, settings, [0] * runs, [0] * runs, NaiveRule())
    paths = follow_draws(logits.expand(runs, -1).contiguous(), drafted, range(runs))
    counts = torch.bincount(torch.tensor([token for _, token in paths.values()]), minlength=vocabulary).double()
    expected = (logits[0].double() / 0.7).softmax(-1) * runs
    assert counts[2] == 0
    large = expected > 5
    statistic = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    assert statistic < int(large.sum()) + 5 * math.sqrt(2 * int(large.sum()))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("fixed", [(), (5,), (5, 0)], ids=["none chosen", "one chosen", "two chosen"])
@pytest.mark.parametrize("broken", [False, True])
def test_kernel_verifies_drawn_last_child_losslessly(temperature: float, fixed: tuple[int, ...], broken: bool) -> None:
    runs, vocabulary = 8000, 300
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1 + len(fixed) + 1, vocabulary, generator=generator)
    logits[0, :8] += 5.0
    p = (logits[0].double() / temperature).softmax(-1)
    ids = [token for token in (5, 3, 0, 7, 1) if token not in fixed]
    q = torch.rand(len(ids), generator=generator) + 0.2
    q = q / q.sum()
    noise = Noise.of_seeds(range(runs), [4] * runs, torch.device("cpu"))
    places = torch.searchsorted(q.cumsum(0), noise.uniform(Purpose.DRAFT, len(fixed))).clamp(max=len(ids) - 1)
    y = torch.tensor(ids)[places].tolist()
    parents, width = [-1] * (len(fixed) + 1), len(fixed) + 1
    drawn = DrawnChildren(array("q"), array("q"), array("f"))
    for _ in range(runs):
        drawn.child.extend([len(fixed), *[-1] * width])
        drawn.ids.extend([*ids, *[0] * (8 - len(ids)), *[0] * (8 * width)])
        claimed = [share / 4 for share in q.tolist()] if broken else q.tolist()
        drawn.q.extend([*claimed, *[0.0] * (8 - len(ids)), *[0.0] * (8 * width)])
    trees = [([*fixed, y[seed]], parents) for seed in range(runs)]
    settings = [SamplingParams(temperature, seed=seed) for seed in range(runs)]
    drafted = VerificationBatch(trees, settings, [4] * runs, [0] * runs, NaiveRule(), drawn_children=drawn)
    paths = list(follow_draws(logits.repeat(runs, 1), drafted, range(runs)).values())
    first = [tokens[path[0]] if path else token for (tokens, _), (path, token) in zip(trees, paths, strict=True)]
    counts = torch.bincount(torch.tensor(first), minlength=vocabulary).double()
    expected = p * runs
    large = expected > 5
    statistic = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    limit = int(large.sum()) + 5 * math.sqrt(2 * int(large.sum()))
    assert statistic > 2 * limit if broken else statistic < limit
    kept = sum(bool(path) for path, _ in paths) / runs
    common = float(torch.minimum(p[ids], q.double()).sum() + p[list(fixed)].sum())
    assert broken or abs(kept - common) < 5 * math.sqrt(common / runs)


def test_kernel_supports_only_softmaxes_of_float32() -> None:
    for params in (SamplingParams(0.0), SamplingParams(1.0, top_k=3), SamplingParams(1.0, top_p=0.9)):
        assert not is_softmax(params)
    assert is_softmax(SamplingParams(0.3, min_p=0.1))
    logits = torch.zeros(2, 40)
    assert readable(logits)
    for other in (logits.double(), logits.bfloat16(), logits.T):
        assert not readable(other)


@pytest.mark.parametrize("values", [torch.full((1, 40), torch.nan), torch.full((1, 40), -torch.inf)])
def test_logits_without_distribution_are_refused(values: Tensor) -> None:
    with pytest.raises(ValueError, match="not numbers"):
        follow_draws(values, VerificationBatch([([], [])], [SamplingParams(1.0)], [0], [0], NaiveRule()), [0])
