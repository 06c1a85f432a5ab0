"""Entry point of verification: equal decisions of all backends, and no unnecessary computation on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from osd.verification import VERIFICATIONS, Rule
from osd.verification.draws import VerificationBatch
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import ROOT, DraftBatch
from osd.verification.verify import PendingVerdicts, uses_drawn_children, verify
from tests.other_device import OTHER_DEVICE, OtherDevice

BATCH, VOCABULARY = 60, 300
SHAPES = [[ROOT, 0, 1, 2], [ROOT, ROOT, 0, 0, 2], [ROOT], [], [ROOT, 0, 0, ROOT, 3, 3]]
NAIVE = VERIFICATIONS["naive"]
SOFTMAX, LIMITED = SamplingParams(0.8, min_p=0.01), SamplingParams(0.8, top_k=20, top_p=0.9)
Decisions = list[tuple[list[int], list[int], int]]


def decided(undecided: PendingVerdicts) -> Decisions:
    return undecided.decide([tensor.tolist() for tensor in undecided.tensors])


def chosen(settings: Sequence[SamplingParams], rule: Rule = NAIVE) -> tuple[VerificationBatch, Tensor]:
    """Return trees of chosen tokens, about half of them accepted, and the logits of their rows."""
    generator = torch.Generator().manual_seed(3)
    shapes = [SHAPES[b % len(SHAPES)] for b in range(BATCH)]
    trees = [(torch.randint(0, 3, (len(shape),), generator=generator).tolist(), shape) for shape in shapes]
    logits = torch.randn(sum(1 + len(shape) for shape in shapes), VOCABULARY, generator=generator)
    logits[:, :3] += 6.0
    seeded = [replace(settings[b % len(settings)], seed=b) for b in range(BATCH)]
    return VerificationBatch(trees, seeded, [b % 7 for b in range(BATCH)], [5 + b for b in range(BATCH)], rule), logits


def drawn_chains() -> tuple[VerificationBatch, Tensor]:
    """Return chains drawn from q, and the logits of their rows; a third of the requests are repeatable."""
    generator, depth = torch.Generator().manual_seed(4), 3
    scores = torch.randn(BATCH, depth, VOCABULARY, generator=generator) * 2
    q = scores.softmax(-1)
    columns = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(BATCH, depth)
    draft = DraftBatch.chains(columns, torch.full((BATCH,), depth), None, columns, q)
    trees = [(tokens, list(range(ROOT, depth - 1))) for tokens in columns.tolist()]
    noise = torch.randn(BATCH, depth + 1, VOCABULARY, generator=generator) * 0.5
    noise[:, :depth] += scores
    settings = [SamplingParams(1.0, seed=b, repeatable=b % 3 == 0) for b in range(BATCH)]
    steps, lengths = [b % 7 for b in range(BATCH)], [5 + b for b in range(BATCH)]
    return VerificationBatch(trees, settings, steps, lengths, VERIFICATIONS["chain"], draft=draft), noise.flatten(0, 1)


def decided_on_device(drafts: VerificationBatch, logits: Tensor) -> Decisions:
    """Return the decisions on another device."""
    with OtherDevice():
        draft = drafts.draft
        if draft is not None:
            moved = {name: value.to(OTHER_DEVICE) for name, value in vars(draft).items() if isinstance(value, Tensor)}
            draft = replace(draft, **moved)
        away = logits.to(OTHER_DEVICE)
        return decided(verify(replace(drafts, draft=draft), lambda: away))


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd.runtime.native.kernels", lambda: None)
    monkeypatch.setattr("osd.verification.verify.kernels", lambda: None)


REPEATABLE = replace(SOFTMAX, repeatable=True)
SETTINGS = {
    "softmaxes": [SOFTMAX],
    "limits": [LIMITED],
    "repeatable": [REPEATABLE],
    "all kinds": [SOFTMAX, LIMITED, REPEATABLE, replace(LIMITED, repeatable=True)],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_backends_decide_equally_on_chosen_trees(settings: list[SamplingParams], monkeypatch: pytest.MonkeyPatch):
    drafts, logits = chosen(settings)
    decisions = decided(verify(drafts, lambda: logits))
    assert decisions == decided_on_device(drafts, logits)
    without_kernels(monkeypatch)
    assert decisions == decided(verify(drafts, lambda: logits))
    assert {len(path) for _, path, _ in decisions} >= {0, 1, 2}


def test_backends_decide_equally_on_drawn_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, logits = drawn_chains()
    decisions = decided(verify(drafts, lambda: logits))
    assert decisions == decided_on_device(drafts, logits)
    without_kernels(monkeypatch)
    assert decisions == decided(verify(drafts, lambda: logits))
    assert {len(path) for _, path, _ in decisions} == {0, 1, 2, 3}


def test_greedy_draft_follows_the_most_probable_tokens() -> None:
    drafts, logits = chosen([SamplingParams(0.0)])
    goal = logits.argmax(-1)
    decisions = decided(verify(drafts, lambda: logits))
    assert decisions == decided_on_device(drafts, logits)
    assert decisions == decided(verify(drafts, lambda: pytest.fail("the most probable tokens are known"), goal))
    at = 0
    for (tokens, path, token), count in zip(decisions, drafts.rows, strict=True):
        best = goal[at : at + count].tolist()
        assert [tokens[node] for node in path] == [best[1 + node] for node in [ROOT, *path][:-1]]
        assert token == best[1 + (path[-1] if path else ROOT)]
        at += count


def test_greedy_draft_uses_the_walk_of_its_policy() -> None:
    drafts, logits = chosen([SamplingParams(0.0)])
    decisions = decided(verify(replace(drafts, walk=lambda tokens, parents, best: ([], -7)), lambda: logits))
    assert {(*path, token) for _, path, token in decisions} == {(-7,)}


@pytest.mark.parametrize("rule", ["naive", "siblings"])
def test_repeatable_output_ignores_drafts(rule: str) -> None:
    drafts, logits = chosen([REPEATABLE], VERIFICATIONS[rule])
    decisions = decided(verify(drafts, lambda: logits))
    begins = [0, *torch.tensor(drafts.rows).cumsum(0)[:-1].tolist()]
    bare = replace(drafts, trees=[([], [])] * BATCH, steps=[99] * BATCH)
    first = [token for _, _, token in decided(verify(bare, lambda: logits[begins]))]
    assert first == [tokens[path[0]] if path else token for tokens, path, token in decisions]


@pytest.mark.parametrize("kind", ["chosen", "drawn"])
def test_cpu_computes_only_rows_of_accepted_paths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, logits = chosen([LIMITED]) if kind == "chosen" else drawn_chains()
    without_kernels(monkeypatch)
    rows: list[int] = []
    whole = SamplingBatch.probabilities

    def counting(self: SamplingBatch, logits: Tensor, *more: Any, **named: Any) -> Tensor:
        rows.append(len(logits))
        return whole(self, logits, *more, **named)

    monkeypatch.setattr(SamplingBatch, "probabilities", counting)
    decisions = decided(verify(drafts, lambda: logits))
    assert sum(rows) == sum(1 + len(path) for _, path, _ in decisions) < len(logits)


def test_pending_chains_get_tokens_from_the_device() -> None:
    drafts, logits = drawn_chains()
    blank = [([0] * len(parents), parents) for _, parents in drafts.trees]
    unread = replace(drafts, trees=blank, pending=True)
    assert decided(verify(unread, lambda: logits)) == decided(verify(drafts, lambda: logits))


def test_drawn_children_require_the_kernel_for_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    assert uses_drawn_children(NAIVE, [SOFTMAX, SOFTMAX], here)
    for rule, settings, device in (
        (VERIFICATIONS["chain"], SOFTMAX, here),
        (NAIVE, LIMITED, here),
        (NAIVE, REPEATABLE, here),
        (NAIVE, SOFTMAX, torch.device("meta")),
    ):
        assert not uses_drawn_children(rule, [SOFTMAX, settings], device)
    without_kernels(monkeypatch)
    assert not uses_drawn_children(NAIVE, [SOFTMAX], here)
