"""Distribution of answers under a grammar: a G-test against plain masked sampling.

The target has five tokens, and the grammar allows a few dozen answers.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
from collections import Counter
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaForCausalLM

from osd.config import GROWTH_SETTINGS
from osd.drafting import Drafter
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.engine.grammar import Grammar
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams, Update
from osd.verification import penalties
from osd.verification.base import Verdict
from osd.verification.chains import ChainRule
from osd.verification.distributions import Distributions
from osd.verification.noise import Noise
from osd.verification.penalties import forbid
from osd.verification.tree import DraftBatch
from tests.unit.engine import test_distribution
from tests.waiting import HANG_SECONDS

END, PROMPT, COUNT = 0, (3, 1, 4), 400
TOKENS = [b"</s>", b"a", b"b", b"c", b"bc"]
REGEX = "(a|b)(a|bc?)?(cab|b{0,2})"
"""It has forced tokens, optional ends and overlapping tokens."""
FAILED = (-1,)
"""Marker of a failed answer."""


class Five:
    """Tokenizer of the five tokens in the form that the library expects."""

    eos_token_id, bos_token_id, tokens, special_token_ids = END, None, TOKENS, (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        ids = []
        text = text if isinstance(text, bytes) else text.encode()
        while text:
            best = max((t for t in range(1, 5) if text.startswith(TOKENS[t])), key=lambda t: len(TOKENS[t]), default=1)
            ids.append(best)
            text = text[len(TOKENS[best]) :]
        return ids


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    tokenizer = LLTokenizer(TokenizerWrapper(Five()), n_vocab=5, slices=[])
    return Grammar(5, frozenset({END}), lambda: LLMatcher(tokenizer, LLMatcher.grammar_from_regex(REGEX), log_level=0))


model, policy_named = test_distribution.model, test_distribution.policy_named


def exact_distribution(model: LlamaForCausalLM, grammar: Grammar, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of each answer by plain sampling from masked logits."""
    exact, answers = copy.deepcopy(model).double(), {}
    open_paths: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_paths:
        path, mass = open_paths.pop()
        matcher = grammar.matcher()
        assert matcher.consume_tokens(list(path))
        allowed = [token for token in range(5) if matcher.compute_bitmask()[0] >> token & 1]
        if allowed == [END]:
            answers[path] = answers.get(path, 0.0) + mass
            continue
        with torch.no_grad():
            logits = exact(input_ids=torch.tensor([[*PROMPT, *path]]), use_cache=False).logits[0, -1]
        p = (logits[allowed] / temperature).softmax(-1).tolist()
        for token, share in zip(allowed, p, strict=True):
            if token == END:
                answers[path] = answers.get(path, 0.0) + mass * share
            else:
                open_paths.append(((*path, token), mass * share))
    return answers


def p_value(
    model: LlamaForCausalLM,
    grammar: Grammar,
    drafter: Drafter | None,
    policy: Policy | None = None,
    *,
    temperature: float = 1.0,
    count: int = COUNT,
    repeatable: bool = False,
    drafts: bool = True,
    forces: bool = True,
) -> float:
    """Decode many requests that differ only in their seed, and test the distribution of their answers.

    The grammar forces some tokens unless ``forces`` is false, as of an answer that leaves the grammar.
    """
    engine = test_distribution.engine_on(model, drafter)
    updates: queue.Queue[Update] = queue.Queue()
    seen: dict[str, list[int]] = {str(seed): [] for seed in range(count)}
    for seed in range(count):
        sampling = SamplingParams(temperature, seed=seed, repeatable=repeatable)
        engine.submit(
            Request(str(seed), PROMPT, 20, sampling, policy=policy, capture=True, grammar=grammar, speculate=drafts),
            updates.put,
        )
    engine.start()
    try:
        left = count
        while left:
            update = updates.get(timeout=HANG_SECONDS)
            seen[update.request_id] += update.token_ids if update.finish_reason != "error" else FAILED
            left -= update.finish_reason is not None
        counts = engine.counters().speculation()
    finally:
        engine.stop()
    if drafts and forces and FAILED not in map(tuple, seen.values()):
        assert counts.by_source["grammar"].accepted == counts.by_source["grammar"].drafted > 0
    if drafter is not None:
        counts_of_drafters = [
            source_counts for source, source_counts in counts.by_source.items() if source != "grammar"
        ]
        assert sum(source_counts.accepted for source_counts in counts_of_drafters) > count / 20
        assert sum(source_counts.drafted - source_counts.accepted for source_counts in counts_of_drafters) > count / 20
    goal = exact_distribution(model, grammar, temperature)
    answers = Counter(tuple(token for token in tokens if token != END) for tokens in seen.values())
    outside = sum(times for answer, times in answers.items() if answer not in goal)
    statistic = 2 * sum(
        times * float(torch.tensor(times / (goal[answer] * count)).log())
        for answer, times in answers.items()
        if answer in goal
    )
    print(f"G = {statistic:.1f}, {len(goal) - 1} degrees of freedom, {outside} outside, {counts.by_source}")
    return 0.0 if outside else float(chi2.sf(statistic, len(goal) - 1))


def eagle(model: LlamaForCausalLM) -> Eagle:
    """Return a drafter of four of the five tokens, which sometimes has no allowed token."""
    torch.manual_seed(2)
    return Eagle.from_target(copy.deepcopy(model), 4)


@pytest.mark.parametrize("name", ["confidence", "siblings", "traversal", "naive"])
def test_drafts_keep_the_masked_distribution(model: LlamaForCausalLM, grammar: Grammar, name: str) -> None:
    assert p_value(model, grammar, eagle(model), policy_named(name)) > 1e-4


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", test_distribution.POLICIES)
def test_policies_keep_the_masked_distribution_in_long_runs(
    model: LlamaForCausalLM, grammar: Grammar, name: str, temperature: float
) -> None:
    assert p_value(model, grammar, eagle(model), policy_named(name), temperature=temperature, count=20_000) > 1e-4


@pytest.mark.parametrize("kind", ["recall", "mixed"])
def test_deterministic_drafts_keep_the_masked_distribution(model: LlamaForCausalLM, grammar: Grammar, kind: str):
    drafter = Recall() if kind == "recall" else Mixed(eagle(model))
    policy = Policy.of(GROWTH_SETTINGS["best_first"]())  # type: ignore[arg-type]
    assert p_value(model, grammar, drafter, policy) > 1e-4


@pytest.mark.parametrize("drafts", [True, False], ids=["forced tokens", "plain"])
def test_no_drafter_keeps_the_masked_distribution(model: LlamaForCausalLM, grammar: Grammar, drafts: bool) -> None:
    assert p_value(model, grammar, None, drafts=drafts) > 1e-4


def test_seeds_keep_the_masked_distribution(model: LlamaForCausalLM, grammar: Grammar) -> None:
    assert p_value(model, grammar, eagle(model), policy_named("confidence"), repeatable=True) > 1e-4


def without_p(logits: Tensor, rows: Any, constraints: Any, paths: Any, support: Tensor | None) -> None:
    if support is not None:
        forbid(logits, rows, constraints, paths, support)


def at_the_root(logits: Tensor, rows: Any, constraints: Any, paths: Any, support: Tensor | None) -> None:
    forbid(logits, rows, constraints, [()] * len(paths), support)


@pytest.mark.parametrize("broken", [without_p, at_the_root])
def test_wrong_masks_on_p_are_detected(model: LlamaForCausalLM, grammar: Grammar, monkeypatch, broken: Any):
    monkeypatch.setattr(penalties, "forbid", broken)
    assert p_value(model, grammar, eagle(model), policy_named("confidence"), count=300, forces=False) < 1e-9


class WithoutMask(ChainRule):
    """Wrong rule: it assumes a uniform q."""

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        if draft.q is not None:
            draft = dataclasses.replace(draft, q=torch.full_like(draft.q, 1 / draft.q.shape[-1]))
        return super().verify(draft, p, noise)


def test_missing_mask_on_q_is_detected(model: LlamaForCausalLM, grammar: Grammar) -> None:
    policy = dataclasses.replace(policy_named("confidence"), rule=WithoutMask())
    assert p_value(model, grammar, eagle(model), policy, count=800) < 1e-9
