"""The real rules with the real noise over many sequences at once: a G-test on the joint law of the first three
tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from osd.speculation import tree
from osd.speculation.growth import GROWTHS, Growth
from osd.speculation.noise import Noise
from osd.speculation.sampling import SamplingBatch, SamplingParams
from osd.speculation.verification import VERIFICATIONS
from tests.unit.speculation.enumeration import Toy

COUNT = 100_000
LENGTH = 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "BLOCK", 2)


def p_value(
    growth: Growth, rule: str, temperature: float, top_p: float, same_step: bool = False, seed: int = 0
) -> float:
    """Decode three tokens for each of many requests, in rounds of the real code, and test their joint law."""
    vocabulary, batch = 3, torch.arange(COUNT)
    toy = Toy.random(seed, vocabulary, LENGTH + growth.max_nodes + 1, agreement=0.3)
    settings = SamplingBatch.of([SamplingParams(temperature, top_p=top_p)] * COUNT)
    one = SamplingBatch.of([SamplingParams(temperature, top_p=top_p)])
    p = one.probabilities(toy.p.log().float(), torch.zeros(len(toy.p), dtype=torch.int64))
    toy = replace(toy, p=p, q=toy.q.float())
    codes, lengths = torch.zeros(COUNT, dtype=torch.int64), torch.zeros(COUNT, dtype=torch.int64)
    step = 0
    while (lengths < LENGTH).any():
        noise = Noise(batch * 0 + 5, batch, batch * 0 + (0 if same_step else step))
        here = replace(toy, roots=codes.clone())
        draft = growth.grow(here, settings, noise, (lengths < LENGTH) * growth.max_nodes)
        verdict = VERIFICATIONS[rule].verify(draft, here.target(draft), noise)
        for place in range(verdict.path.shape[1] + 1):
            drafted = verdict.path[:, min(place, verdict.path.shape[1] - 1)].clamp(min=0)
            token = torch.where(place < verdict.accepted, draft.tokens[batch, drafted], verdict.token)
            more = (place <= verdict.accepted) & (lengths < LENGTH)
            codes = torch.where(more, codes * vocabulary + 1 + token, codes)
            lengths += more
        step += 1
    goal = torch.ones(1, dtype=torch.float64)
    for depth in range(LENGTH):
        first = sum(vocabulary**d for d in range(depth))
        goal = (goal[:, None] * p[first : first + vocabulary**depth].double()).flatten()
    seen = (codes - sum(vocabulary**d for d in range(LENGTH))).bincount(minlength=len(goal)).double()
    assert not seen[goal == 0].any()
    cells = goal > 0
    statistic = float(2 * torch.xlogy(seen[cells], seen[cells] / (goal[cells] * COUNT)).sum())
    freedom = int(cells.sum()) - 1
    print(f"{growth.name} {rule} T={temperature} top_p={top_p}: G = {statistic:.1f}, {freedom} degrees of freedom")
    return float(chi2.sf(statistic, freedom))


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_tokens_of_several_rounds_of_chains_follow_the_target(temperature: float, top_p: float) -> None:
    assert p_value(GROWTHS["chain"](2), "chain", temperature, top_p) > 1e-4


@pytest.mark.parametrize(("growth", "rule"), [
    (GROWTHS["chain"](2), "block"),
    (GROWTHS["acceptance_head"](h=0.5, depth=3), "chain"),
    (GROWTHS["dynamic_tree"](budget=3), "siblings"),
    (GROWTHS["dynamic_tree"](budget=3, threshold=0.1), "traversal"),
    (GROWTHS["top_k_tree"](budget=3, top_k=2, depth=2), "naive"),
    (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)], draw="top_then_drawn"), "greedy_multidraft"),
    (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)], draw="iid"), "k_seq"),
])  # fmt: skip
def test_tokens_of_several_rounds_of_other_drafts_follow_the_target(growth: Growth, rule: str) -> None:
    assert p_value(growth, rule, 0.7, 0.9) > 1e-4


def test_noise_that_is_used_again_in_the_next_round_is_caught() -> None:
    assert p_value(GROWTHS["chain"](2), "chain", 1.0, 1.0, same_step=True) < 1e-12
