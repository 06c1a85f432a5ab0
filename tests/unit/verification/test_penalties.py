from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from osd.engine.request import SamplingParams
from osd.verification.penalties import Penalties, WithheldTokens, changes_logits, path_tokens
from osd.verification.tree import ROOT

VOCABULARY = 12
PROMPTS = [(1, 2, 2, 3), (4, 4), (5,), (0, 11)]
OUTPUTS = [(2, 6, 6, 6), (), (7, 8), (11, 11)]
SETTINGS = [
    SamplingParams(
        presence_penalty=1.5, frequency_penalty=-0.4, repetition_penalty=1.3, logit_bias=((2, -5.0), (9, 3.0))
    ),
    SamplingParams(),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(frequency_penalty=0.7, logit_bias=((11, 100.0), (3, -100.0))),
]
# Two branches under the first node, a chain, a repeated token before token 0, and a root without nodes.
TOKENS = torch.tensor([[6, 0, 6, 9], [1, 1, 1, -1], [5, 5, 0, -1], [-1, -1, -1, -1]])
PARENTS = torch.tensor([[ROOT, 0, 0, 2], [ROOT, 0, 1, ROOT], [ROOT, 0, 1, ROOT], [ROOT] * 4])
SIZES = (4, 3, 3, 0)
ROWS = torch.tensor([b for b, size in enumerate(SIZES) for _ in range(size + 1)])
NODES = torch.tensor([node for size in SIZES for node in range(ROOT, size)])


def history(row: int, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(int(TOKENS[row, node]))
        node = int(PARENTS[row, node])
    return path[::-1]


def written_out(
    logits: Sequence[float], ids: Sequence[int], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Return a row computed token by token; column c of ``logits`` is token ``ids[c]``."""
    counts, result = Counter(output), []
    for token, logit in zip(ids, logits, strict=True):
        logit += dict(sampling.logit_bias).get(token, 0.0)
        if token in counts or token in prompt:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty * (token in counts)
        result.append(logit)
    return torch.tensor(result)


def penalties() -> Penalties:
    return Penalties(SETTINGS, PROMPTS, OUTPUTS, [None] * len(SETTINGS))


@pytest.mark.parametrize("support", [None, [0, 2, 5, 6, 9, 10], [10, 6, 5, 0, 9, 2]], ids=str)
def test_node_is_penalised_for_its_whole_history(support: list[int] | None) -> None:
    ids = list(range(VOCABULARY)) if support is None else support
    logits = torch.randn(len(ROWS), len(ids), generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    draft = None if support is None else torch.tensor(support)
    tokens = TOKENS
    if support is not None:  # a drafter drafts only tokens of its vocabulary
        tokens = TOKENS.masked_fill(TOKENS == 1, 0)
    result = penalties().adjust(logits, ROWS, NODES, tokens, PARENTS, draft)
    assert torch.equal(logits, before), "the raw logits are still needed"
    for at, (row, node) in enumerate(zip(ROWS.tolist(), NODES.tolist(), strict=True)):
        output = [*OUTPUTS[row], *history(row, node)]
        expected = written_out(logits[at].tolist(), ids, SETTINGS[row], PROMPTS[row], output)
        torch.testing.assert_close(result[at], expected, msg=f"row {row}, node {node}")


@pytest.mark.parametrize(("node", "path"), [(1, [5, 5]), (3, [5, 7, 5, 5])], ids=str)
def test_repeats_on_the_path_are_penalised_together(node: int, path: list[int]) -> None:
    sampling = SamplingParams(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.6)
    made = Penalties([sampling], [[1]], [[2]], [None])
    tokens = torch.tensor([path])
    parents = torch.arange(len(path))[None] - 1
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3
    result = made.adjust(logits, torch.tensor([0]), torch.tensor([node]), tokens, parents)
    expected = written_out(logits[0].tolist(), range(VOCABULARY), sampling, [1], [2, *path])
    torch.testing.assert_close(result[0], expected)


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    prompt, output = [3, 1, 4, 1], [5, 9, 2, 6]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits)
    made = Penalties([SamplingParams(repetition_penalty=1.7)], [prompt], [output[:2]], [None])
    tokens, parents = torch.tensor([output[2:]]), torch.tensor([[ROOT, 0]])
    result = made.adjust(logits, torch.tensor([0]), torch.tensor([1]), tokens, parents)
    torch.testing.assert_close(result, expected)


def test_sequence_without_penalties_keeps_its_logits() -> None:
    assert not any(map(changes_logits, (SamplingParams(), SamplingParams(0.0), SamplingParams(0.3, 5, 0.9, 0.1))))
    logits = torch.randn(4, VOCABULARY)
    made = penalties()
    assert made.adjust(logits, torch.ones(4, dtype=torch.int64), NODES[5:9], TOKENS, PARENTS) is logits
    result = made.adjust(logits, torch.tensor([1, 2, 1, 2]), torch.full((4,), ROOT), TOKENS, PARENTS)
    assert torch.equal(result[::2], logits[::2])
    assert not torch.equal(result[1::2], logits[1::2])


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"])
def test_each_setting_alone_changes_logits(field: str) -> None:
    sampling = dataclasses.replace(SamplingParams(), **{field: ((3, 1.0),) if field == "logit_bias" else 1.5})
    assert changes_logits(sampling)
    made = Penalties([sampling], [[1]], [[2, 2]], [None])
    root, bare = torch.tensor([ROOT]), TOKENS[:1]
    change = made.adjust(torch.ones(1, VOCABULARY), torch.tensor([0]), root, bare, bare)[0] - 1
    goal = {
        "presence_penalty": {2: -1.5},
        "frequency_penalty": {2: -3.0},
        "repetition_penalty": {1: 1 / 1.5 - 1, 2: 1 / 1.5 - 1},
        "logit_bias": {3: 1.0},
    }[field]
    torch.testing.assert_close(change, torch.tensor([goal.get(token, 0.0) for token in range(VOCABULARY)]))


def test_excluded_token_stays_excluded() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [2, 9]] = -torch.inf
    root = torch.tensor([ROOT])
    result = penalties().adjust(logits, torch.tensor([0]), root, TOKENS[:1], PARENTS[:1])
    assert result.isneginf().nonzero().tolist() == [[0, 2], [0, 9]]
    assert not result.isnan().any()


def test_float64_logits_stay_float64() -> None:
    logits = torch.randn(len(ROWS), VOCABULARY, dtype=torch.float64)
    assert penalties().adjust(logits, ROWS, NODES, TOKENS, PARENTS).dtype == torch.float64


def test_path_tokens_start_at_the_node() -> None:
    result = path_tokens(TOKENS, PARENTS, torch.tensor([0, 0, 2]), torch.tensor([3, ROOT, 1]))
    assert result.tolist() == [[9, 6, 6], [-1, -1, -1], [5, 5, -1]]
    assert path_tokens(TOKENS, PARENTS, torch.tensor([0]), torch.tensor([ROOT])).shape == (1, 0)


@pytest.mark.parametrize("support", [None, [0, 2, 5, 6, 9, 10], [10, 6, 5, 0, 9, 2]], ids=str)
def test_withheld_tokens_have_no_probability_while_early(support: list[int] | None) -> None:
    ids = list(range(VOCABULARY)) if support is None else support
    settings = [SETTINGS[0], *[SamplingParams()] * 3]
    withheld = [
        WithheldTokens(frozenset({0, 3}), 2),
        WithheldTokens(frozenset({5, 11}), 1),
        None,
        WithheldTokens(frozenset({9}), 4),
    ]
    logits = torch.randn(len(ROWS), len(ids), generator=torch.Generator().manual_seed(1)) * 3
    draft = None if support is None else torch.tensor(support)
    tokens = TOKENS if support is None else TOKENS.masked_fill(TOKENS == 1, 0)
    result, reference = (
        Penalties(settings, PROMPTS, OUTPUTS, some).adjust(logits, ROWS, NODES, tokens, PARENTS, draft)
        for some in (withheld, [None] * 4)
    )
    gone = result.isneginf()
    assert torch.equal(result.masked_fill(gone, 0), reference.masked_fill(gone, 0))
    for at, (row, node) in enumerate(zip(ROWS.tolist(), NODES.tolist(), strict=True)):
        tokens_held = withheld[row]
        early = tokens_held is not None and len(history(row, node)) < tokens_held.early
        expected = {token for token in ids if early and tokens_held is not None and token in tokens_held.ids}
        assert {token for token, left in zip(ids, gone[at].tolist(), strict=True) if left} == expected
