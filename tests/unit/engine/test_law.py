"""The whole engine keeps the target's law: a G-test on the joint law of the first three tokens.

The target knows five tokens and the drafter may draft four of them, so that every cell of the law is met often.
"""

from __future__ import annotations

import copy
import queue
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from osd.drafters.eagle_initial import eagle_from_target
from osd.engine.engine import Engine
from osd.engine.request import Request, Sampling, Update
from osd.speculation.noise import Noise, Purpose
from osd.speculation.tree import DraftBatch
from osd.speculation.verification import VERIFICATIONS
from osd.speculation.verification.base import Verdict
from osd.target.attention import NAME
from osd.target.model import SlotModel
from tests.tiny import tokenizer
from tests.unit.engine.harness import settings

VOCABULARY, LENGTH, COUNT, PROMPT = 5, 3, 4000, (3, 1, 4)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


def law(model: LlamaForCausalLM, sampling: Sampling) -> Tensor:
    """[V ** LENGTH] the exact joint law of the first tokens, the first token in the highest place."""
    exact = copy.deepcopy(model).double()
    goal = torch.ones(1, dtype=torch.float64)
    paths = torch.tensor([PROMPT])
    for _ in range(LENGTH):
        with torch.no_grad():
            scores = exact(input_ids=paths, use_cache=False).logits[:, -1] / sampling.temperature
        if sampling.top_k:
            scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -torch.inf)
        goal = (goal[:, None] * scores.softmax(-1)).flatten()
        following = torch.arange(VOCABULARY).repeat(len(paths))[:, None]
        paths = torch.cat([paths.repeat_interleave(VOCABULARY, 0), following], 1)
    return goal


def p_value(model: LlamaForCausalLM, sampling: Sampling) -> float:
    """Decode many requests that differ in their seed only, in batches of 64, and test what came first."""
    torch.manual_seed(2)
    drafter = eagle_from_target(copy.deepcopy(model), 4)
    slotted = copy.deepcopy(model)
    slotted.set_attn_implementation(NAME)
    chosen = settings(Path("tiny"), slots=64, depth=2, chunk=4096)
    target = SlotModel(slotted, slots=64, context=128, scratch=3, taps=drafter.taps)
    engine = Engine(target, tokenizer(), chosen, drafter, 1)
    updates: queue.Queue[Update] = queue.Queue()
    seen: dict[str, list[int]] = {str(seed): [] for seed in range(COUNT)}
    for seed in range(COUNT):
        one = Sampling(sampling.temperature, sampling.top_k, seed=seed)
        engine.submit(Request(str(seed), PROMPT, LENGTH + 1, one, ignore_eos=True), updates.put)
    engine.start()
    try:
        left = COUNT
        while left:
            update = updates.get(timeout=60)
            seen[update.request_id] += update.token_ids
            left -= update.finish_reason is not None
        counts = engine.counters().speculation()
    finally:
        engine.stop()
    assert counts.accepted > COUNT / 10
    assert counts.drafted - counts.accepted > COUNT / 10
    codes = torch.tensor(
        [sum(t * VOCABULARY ** (LENGTH - 1 - i) for i, t in enumerate(s[:LENGTH])) for s in seen.values()]
    )
    goal = law(model, sampling)
    cells = goal > 0
    found = codes.bincount(minlength=len(goal)).double()
    outside = int(found[~cells].sum())
    statistic = float(2 * torch.xlogy(found[cells], found[cells] / (goal[cells] * COUNT)).sum())
    freedom = int(cells.sum()) - 1
    print(
        f"T={sampling.temperature} top_k={sampling.top_k}: G = {statistic:.1f}, {freedom} degrees of freedom, "
        f"{outside} outside, acceptance rate {counts.acceptance_rate:.2f}"
    )
    return 0.0 if outside else float(chi2.sf(statistic, freedom))


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_k=3)], ids=str)
def test_speculation_does_not_change_the_law_of_the_output(model: LlamaForCausalLM, sampling: Sampling) -> None:
    assert p_value(model, sampling) > 1e-4


class AcceptEverything:
    """What must not pass: every drafted token is kept."""

    def verify(self, draft: DraftBatch, p: Tensor, noise: Noise) -> Verdict:
        index = torch.arange(draft.tokens.shape[1])
        token = noise.pick(p[torch.arange(len(p)), draft.sizes], Purpose.RESIDUAL, draft.sizes)
        # One in four rounds stays honest, so that both outcomes are there to be counted.
        honest = VERIFICATIONS["honest"].verify(draft, p, noise)
        broken = noise.uniform(Purpose.BONUS) < 0.75
        path = torch.where(index < draft.sizes[:, None], index, -1)
        return Verdict(
            torch.where(broken[:, None], path, honest.path),
            torch.where(broken, draft.sizes, honest.accepted),
            torch.where(broken, token, honest.token),
        )


def test_a_rule_that_keeps_what_it_should_not_is_caught(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFICATIONS, "honest", VERIFICATIONS["chain"])
    monkeypatch.setitem(VERIFICATIONS, "chain", AcceptEverything())  # type: ignore[arg-type]
    assert p_value(model, Sampling(1.0)) < 1e-9
