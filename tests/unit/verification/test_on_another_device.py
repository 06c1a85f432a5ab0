"""Verification and draws on a device: the same numbers as on a CPU, and no wait for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from osd.verification import VERIFICATIONS, Rule, Verdict
from osd.verification.descent import NaiveRule
from osd.verification.draws import VerificationBatch
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import DraftBatch
from osd.verification.verify import PendingVerdicts, verify
from tests.other_device import OTHER_DEVICE, WAITS, DeviceTensor, OtherDevice

BATCH, DEPTH, VOCABULARY, DRAFTED = 64, 4, 40, 30
SUPPORT = torch.arange(DRAFTED) + 5
HERE = torch.device("cpu")


@pytest.fixture
def other_device() -> Iterator[None]:
    with OtherDevice():
        WAITS.clear()
        yield


def numbers(value: Tensor) -> Tensor:
    """Return the numbers of a tensor on the device without waiting."""
    assert isinstance(value, DeviceTensor)
    return value.numbers


def moved(draft: DraftBatch) -> DraftBatch:
    parts = {entry.name: getattr(draft, entry.name) for entry in fields(draft)}
    return replace(draft, **{name: part.to(OTHER_DEVICE) for name, part in parts.items() if isinstance(part, Tensor)})


def drafted(seed: int) -> tuple[DraftBatch, Tensor]:
    """Return chains of different lengths, some empty, and p [B, N + 1, V] that accepts about half of them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(BATCH, DEPTH, DRAFTED, generator=generator) * 2
    q = logits.softmax(-1)
    columns = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(BATCH, DEPTH)
    sizes = torch.randint(0, DEPTH + 1, (BATCH,), generator=generator)
    scores = torch.randn(BATCH, DEPTH + 1, VOCABULARY, generator=generator)
    scores[:, :DEPTH, SUPPORT] += logits
    draft = DraftBatch.chains(SUPPORT[columns], sizes, SUPPORT, columns, q)
    return draft, scores.softmax(-1)


def noise(seed: int, device: torch.device) -> Noise:
    return Noise.of_seeds([seed * BATCH + b for b in range(BATCH)], list(range(BATCH)), device)


def assert_equal(verdict: Verdict, goal: Verdict) -> None:
    assert torch.equal(numbers(verdict.path), goal.path)
    assert torch.equal(numbers(verdict.accepted), goal.accepted)
    assert torch.equal(numbers(verdict.token), goal.token)


@pytest.mark.parametrize("name", ["chain", "block"])
def test_chain_rule_equals_cpu_and_does_not_wait(name: str) -> None:
    rule, kept = VERIFICATIONS[name], Counter[int]()
    none = DraftBatch.empty(BATCH), drafted(0)[1][:, :1]
    for seed, (draft, p) in enumerate([*map(drafted, range(10)), none]):
        goal = rule.verify(draft, p, noise(seed, HERE))
        with OtherDevice():
            arguments = moved(draft), p.to(OTHER_DEVICE), noise(seed, OTHER_DEVICE)
            WAITS.clear()
            verdict = rule.verify(*arguments)
            assert not WAITS
        assert_equal(verdict, goal)
        kept.update(goal.accepted.tolist())
    assert min(kept[count] for count in range(DEPTH + 1)) > 20


@pytest.mark.usefixtures("other_device")
def test_rule_that_waits_for_the_device_is_noticed() -> None:
    draft, p = drafted(0)
    arguments = moved(draft), p.to(OTHER_DEVICE), noise(0, OTHER_DEVICE)
    WAITS.clear()
    VERIFICATIONS["siblings"].verify(*arguments)
    assert WAITS


SETTINGS = [
    (0.7, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.5, 40, 0.6, 0.0), (1.0, 1, 1.0, 0.0),
    (2.0, 0, 1e-6, 0.0), (1.0, 10**6, 0.99, 0.0), (1.0, 0, 1.0, 0.1), (1.2, 30, 0.8, 0.02), (1.0, 0, 1.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("chosen", [range(10), [0], [1, 9], [2, 5], [3, 6], [7], [9]])
@pytest.mark.parametrize("coarse", [False, True])
def test_probabilities_equal_cpu_and_do_not_wait(chosen: Any, coarse: bool, other_device: None) -> None:
    settings = [SamplingParams(*SETTINGS[index]) for index in chosen]
    logits = torch.randn(3 * len(settings), 3000, generator=torch.Generator().manual_seed(1)) * 3
    logits = logits.round() if coarse else logits  # many equal logits, as from bfloat16
    rows = torch.arange(len(logits)) // 3
    goal = SamplingBatch.of(settings).probabilities(logits, rows)
    away, owners = logits.to(OTHER_DEVICE), rows.to(OTHER_DEVICE)
    WAITS.clear()
    result = SamplingBatch.of(settings, OTHER_DEVICE).probabilities(away, owners)
    assert not WAITS
    assert torch.equal(numbers(result), goal)


def read(undecided: PendingVerdicts) -> list[Any]:
    """Return the values of the tensors of a verification."""
    return [tensor.tolist() for tensor in undecided.tensors]


def drafts_of(trees: Any, repeatable: Sequence[bool], rule: Rule, **more: Any) -> VerificationBatch:
    settings = [SamplingParams(seed=b, repeatable=flag) for b, flag in enumerate(repeatable)]
    return VerificationBatch(trees, settings, list(range(BATCH)), [3 + b for b in range(BATCH)], rule, **more)


def expected(drafts: VerificationBatch, draft: DraftBatch, p: Tensor) -> list[tuple[list[int], int]]:
    """Return the decisions of a rule on each sequence alone, on a CPU."""
    decisions: list[tuple[list[int], int]] = []
    for b, settings in enumerate(drafts.settings):
        repeatable, alone = settings.repeatable, torch.tensor([b])
        keyed = Noise.of_seeds([settings.seed], [0 if repeatable else drafts.steps[b]], HERE)
        first = torch.tensor([drafts.lengths[b] if repeatable else 0])
        if repeatable or isinstance(drafts.rule, NaiveRule):
            verdict = NaiveRule().verify(draft.select(alone), p[alone], keyed, first)
        else:
            verdict = drafts.rule.verify(draft.select(alone), p[alone], keyed)
        decisions.append((verdict.path[0, : verdict.accepted[0]].tolist(), int(verdict.token[0])))
    return decisions


@pytest.mark.parametrize("known", [True, False], ids=["chains on the host", "pending chains"])
@pytest.mark.parametrize("name", ["chain", "block", "naive"])
def test_single_read_decides_about_all_sequences(name: str, known: bool) -> None:
    draft, p = drafted(1)
    chains = [ids[:size] for ids, size in zip(draft.tokens.tolist(), draft.sizes.tolist(), strict=True)]
    shown = [chain if known else [0] * DEPTH for chain in chains]
    trees = [(tokens, list(range(-1, len(tokens) - 1))) for tokens in shown]
    logits = torch.cat([p[b, : 1 + len(tokens)] for b, (tokens, _) in enumerate(trees)]).log()
    repeatable = [b % 3 == 0 for b in range(BATCH)]
    with OtherDevice():
        away, scores = moved(draft), logits.to(OTHER_DEVICE)
        drafts = drafts_of(trees, repeatable, VERIFICATIONS[name], draft=away, pending=not known)
        WAITS.clear()
        undecided = verify(drafts, lambda: scores)
        assert undecided.tensors
        assert not WAITS
        decisions = undecided.decide(read(undecided))
    assert [tokens for tokens, _, _ in decisions] == chains
    goal = expected(drafts, draft, p)
    assert [(path, token) for _, path, token in decisions] == goal
    assert {len(path) for path, _ in goal} >= {0, 1, 3}


def test_chosen_tree_is_verified_without_waiting() -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = [[-1, -1, 0, 0, 2], [-1], [], [-1, 0, 0, -1, 3, 3]]
    trees = [(torch.randint(0, 4, (len(shape),), generator=generator).tolist(), shape) for shape in shapes] * 16
    p = torch.randn(BATCH, 7, 4, generator=generator).softmax(-1)
    logits = torch.cat([p[b, : 1 + len(shape)] for b, (_, shape) in enumerate(trees)]).log()
    drafts = drafts_of(trees, [b % 2 == 0 for b in range(BATCH)], NaiveRule())
    with OtherDevice():
        scores = logits.to(OTHER_DEVICE)
        WAITS.clear()
        undecided = verify(drafts, lambda: scores)
        assert not WAITS
        decisions = undecided.decide(read(undecided))
    goal = expected(drafts, DraftBatch.chosen(trees), p)
    assert [(path, token) for _, path, token in decisions] == goal
    assert max(len(path) for path, _ in goal) > 1
