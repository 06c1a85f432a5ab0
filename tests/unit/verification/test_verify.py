"""The entry of verification: every backend makes the same decisions, and a CPU computes no more than it needs."""

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
from tests.other_device import THERE, OtherDevice

BATCH, VOCABULARY = 60, 300
SHAPES = [[ROOT, 0, 1, 2], [ROOT, ROOT, 0, 0, 2], [ROOT], [], [ROOT, 0, 0, ROOT, 3, 3]]
NAIVE = VERIFICATIONS["naive"]
SOFTMAX, LIMITED = SamplingParams(0.8, min_p=0.01), SamplingParams(0.8, top_k=20, top_p=0.9)
Decided = list[tuple[list[int], list[int], int]]


def decided(undecided: PendingVerdicts) -> Decided:
    return undecided.decide([one.tolist() for one in undecided.tensors])


def chosen(settings: Sequence[SamplingParams], rule: Rule = NAIVE) -> tuple[VerificationBatch, Tensor]:
    """Trees of chosen tokens of which about half are kept, and the logits of their rows."""
    generator = torch.Generator().manual_seed(3)
    shapes = [SHAPES[b % len(SHAPES)] for b in range(BATCH)]
    trees = [(torch.randint(0, 3, (len(shape),), generator=generator).tolist(), shape) for shape in shapes]
    logits = torch.randn(sum(1 + len(shape) for shape in shapes), VOCABULARY, generator=generator)
    logits[:, :3] += 6.0
    seeded = [replace(settings[b % len(settings)], seed=b) for b in range(BATCH)]
    return VerificationBatch(trees, seeded, [b % 7 for b in range(BATCH)], [5 + b for b in range(BATCH)], rule), logits


def drawn_chains() -> tuple[VerificationBatch, Tensor]:
    """Chains drawn from q; a third of the requests are repeatable."""
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


def elsewhere(drafts: VerificationBatch, logits: Tensor) -> Decided:
    """Decisions of a device that the host does not wait for."""
    with OtherDevice():
        draft = drafts.draft
        if draft is not None:
            moved = {name: value.to(THERE) for name, value in vars(draft).items() if isinstance(value, Tensor)}
            draft = replace(draft, **moved)
        away = logits.to(THERE)
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
def test_chosen_trees_are_decided_alike_by_every_backend(
    settings: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, logits = chosen(settings)
    found = decided(verify(drafts, lambda: logits))
    assert found == elsewhere(drafts, logits)
    without_kernels(monkeypatch)
    assert found == decided(verify(drafts, lambda: logits))
    assert {len(path) for _, path, _ in found} >= {0, 1, 2}


def test_drawn_chains_are_decided_alike_by_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, logits = drawn_chains()
    found = decided(verify(drafts, lambda: logits))
    assert found == elsewhere(drafts, logits)
    without_kernels(monkeypatch)
    assert found == decided(verify(drafts, lambda: logits))
    assert {len(path) for _, path, _ in found} == {0, 1, 2, 3}


def test_greedy_drafts_follow_the_most_probable_tokens_of_logits_or_given_ones() -> None:
    drafts, logits = chosen([SamplingParams(0.0)])
    goal = logits.argmax(-1)
    found = decided(verify(drafts, lambda: logits))
    assert found == elsewhere(drafts, logits)
    assert found == decided(verify(drafts, lambda: pytest.fail("the most probable tokens are known"), goal))
    at = 0
    for (tokens, path, token), count in zip(found, drafts.rows, strict=True):
        best = goal[at : at + count].tolist()
        assert [tokens[node] for node in path] == [best[1 + node] for node in [ROOT, *path][:-1]]
        assert token == best[1 + (path[-1] if path else ROOT)]
        at += count


def test_a_greedy_policy_with_its_own_walk_is_asked_instead() -> None:
    drafts, logits = chosen([SamplingParams(0.0)])
    found = decided(verify(replace(drafts, walk=lambda tokens, parents, best: ([], -7)), lambda: logits))
    assert {(*path, token) for _, path, token in found} == {(-7,)}


@pytest.mark.parametrize("rule", ["naive", "siblings"])
def test_text_of_a_repeatable_request_depends_on_neither_draft_nor_step(rule: str) -> None:
    drafts, logits = chosen([REPEATABLE], VERIFICATIONS[rule])
    found = decided(verify(drafts, lambda: logits))
    begins = [0, *torch.tensor(drafts.rows).cumsum(0)[:-1].tolist()]
    bare = replace(drafts, trees=[([], [])] * BATCH, steps=[99] * BATCH)
    first = [token for _, _, token in decided(verify(bare, lambda: logits[begins]))]
    assert first == [tokens[path[0]] if path else token for tokens, path, token in found]


@pytest.mark.parametrize("kind", ["chosen", "drawn"])
def test_a_cpu_computes_no_row_that_no_accepted_path_reaches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, logits = chosen([LIMITED]) if kind == "chosen" else drawn_chains()
    without_kernels(monkeypatch)
    rows: list[int] = []
    whole = SamplingBatch.probabilities

    def counting(self: SamplingBatch, logits: Tensor, *more: Any, **named: Any) -> Tensor:
        rows.append(len(logits))
        return whole(self, logits, *more, **named)

    monkeypatch.setattr(SamplingBatch, "probabilities", counting)
    found = decided(verify(drafts, lambda: logits))
    assert sum(rows) == sum(1 + len(path) for _, path, _ in found) < len(logits)


def test_pending_chains_come_with_the_tokens_that_the_device_knew() -> None:
    drafts, logits = drawn_chains()
    blank = [([0] * len(parents), parents) for _, parents in drafts.trees]
    unread = replace(drafts, trees=blank, pending=True)
    assert decided(verify(unread, lambda: logits)) == decided(verify(drafts, lambda: logits))


def test_last_children_may_be_drawn_only_where_the_kernel_decides_about_all(monkeypatch: pytest.MonkeyPatch) -> None:
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
