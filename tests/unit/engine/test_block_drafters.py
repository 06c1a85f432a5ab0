"""Output distribution with drafters that draft several tokens in one call, by enumeration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.dspark.drafter import DSpark
from osd.drafting.falcon.drafter import Falcon
from osd.drafting.growth import GROWTHS, Growth
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.prompt_tokens.drafter import PromptTokens
from osd.drafting.session import CommittedTokens, Runtime, TargetRows, Tree
from osd.runtime.batch import consecutive_rows
from osd.runtime.model import SlotModel
from osd.verification.tree import DraftBatch, TreeBuilder
from tests.unit.drafting.sequences import expand_chain
from tests.unit.engine.steps import Distortion, EnumeratedSteps, as_drawn, conditioned, few_token_target, randomised
from tests.unit.verification.enumeration import BATCH, Law, Toy, law_of

RUNTIME = Runtime(BATCH, 16, 10)
RANKS = ((0.6, 0.2, 0.1), (0.5, 0.2), (0.4,))


def prompted_model(target: LlamaForCausalLM, tokens: int) -> LanguageModel:
    """Return a draft model of the target's first layer with random prompt tokens."""
    torch.manual_seed(5)
    target.config.max_position_embeddings = 256  # long enough for all texts
    drafter = LanguageModel.first_layers(target, 1, tokens)
    with torch.no_grad():
        for weight in drafter.trained().values():
            weight.add_(torch.randn_like(weight) * 0.2)
        drafter.lookahead.prompts.normal_(0, 1.0)
    return drafter


def falcon(block: int) -> tuple[AutoregressiveSession, CommittedTokens]:
    drafter = randomised(Falcon.from_target(few_token_target(), block, 3))
    with torch.no_grad():
        drafter.rows.normal_(0, 0.4)
        drafter.target_head.normal_(0, 0.4)
    return drafter.session(RUNTIME), CommittedTokens([0, 1, 1], torch.randn(3, 16))


def dspark(block: int) -> tuple[AutoregressiveSession, CommittedTokens]:
    """Return a session with a random Markov head and a random acceptance head."""
    drafter = randomised(DSpark.from_target(few_token_target(layers=3), block, 2, 4, 3).add_head())
    with torch.no_grad():
        drafter.rows.normal_(0, 0.4)
        drafter.target_head.normal_(0, 0.4)
    return drafter.session(RUNTIME), CommittedTokens([0, 1, 1], torch.randn(3, 3 * 16))


def draft_model(tokens: int) -> tuple[AutoregressiveSession, CommittedTokens]:
    return prompted_model(randomised(few_token_target()), tokens).session(RUNTIME), CommittedTokens([0, 1, 1])


def prompt_tokens(depth: int) -> tuple[AutoregressiveSession, CommittedTokens]:
    """Return a session after a step with ``depth`` prompt tokens as riders."""
    target = randomised(few_token_target())
    drafter = PromptTokens.from_target(target, 2)
    slotted = SlotModel(copy.deepcopy(target), slots=1, context=16, scratch=9, embeddings=2)
    rows = consecutive_rows(0, 0, [2, 0, 1, *(3 + level for level in range(depth))])
    rows = replace(rows, embedded=drafter.weights()["prompts"].flatten(0, 1))
    logits = slotted.forward(rows, torch.arange(2, 3 + depth)).logits
    tree = Tree([], [], (), [-1 - level for level in range(depth)], list(range(-1, depth - 1)))
    return drafter.session(RUNTIME), CommittedTokens([1], None, TargetRows(tree, [], logits, None))


Maker = Callable[[int], tuple[AutoregressiveSession, CommittedTokens]]
WAYS: dict[str, tuple[Growth, str]] = {
    "chain": (GROWTHS["chain"](3), "chain"),
    "block": (GROWTHS["chain"](3), "block"),
    "cut by a head": (GROWTHS["acceptance_head"](h=0.5, depth=3), "chain"),
    "siblings": (GROWTHS["dynamic_tree"](budget=3), "siblings"),
    "by level": (GROWTHS["dynamic_tree"](budget=3, threshold=0.1), "traversal"),
    "traversal": (GROWTHS["static_tree"](paths=[(0,), (1,), (0, 0)]), "traversal"),
    "sparse": (GROWTHS["sparse_tree"](ranks=RANKS, budget=4), "naive"),
    "sparse, drawn": (GROWTHS["sparse_tree"](ranks=RANKS, budget=3, draw="without_replacement"), "siblings"),
    "top k": (GROWTHS["top_k_tree"](budget=4, top_k=2, depth=3), "naive"),
    "best first": (GROWTHS["best_first"](budget=4), "naive"),
}
CASES: list[tuple[Maker, str, int]] = [
    *((dspark, way, 3) for way in WAYS),
    *((falcon, way, 3 if way == "block" else 2) for way in ("chain", "block", "siblings", "traversal", "top k")),
    *((draft_model, way, 2 if way == "block" else 1) for way in ("chain", "block", "siblings", "traversal", "top k")),
    *((prompt_tokens, way, 2) for way in WAYS),
    (prompt_tokens, "chain", 1),
]


def enumerated(maker: Maker, way: str, tokens: int, distort: Distortion = as_drawn) -> Law:
    session, kept = maker(tokens)
    toy = Toy.random(5 if maker is prompt_tokens else 9, 3, 4)
    result = law_of(EnumeratedSteps(session, 2, kept, *WAYS[way], toy, distort), toy, 4)
    print(result)
    return result


@pytest.mark.parametrize(("maker", "way", "tokens"), CASES)
def test_block_drafts_keep_the_output_distribution(maker: Maker, way: str, tokens: int) -> None:
    result = enumerated(maker, way, tokens)
    assert result.error < 1e-9
    assert result.ways > 10 or result.accepted > 0.1


@pytest.mark.parametrize("maker", [dspark, falcon, draft_model, prompt_tokens])
@pytest.mark.parametrize("way", ["chain", "block", "traversal"])
def test_q_conditioned_on_the_first_token_is_detected(maker: Maker, way: str) -> None:
    assert enumerated(maker, way, 2 if maker is not draft_model or way == "block" else 1, conditioned).error > 1e-3


def test_cut_that_looks_ahead_is_detected() -> None:
    """A head may end a draft after a token that it doubts; a cut that drops this token is wrong."""
    (session, kept), toy = dspark(3), Toy.random(9, 3, 4)
    for slot in range(3):
        session.open(slot, 2)
        session.commit(slot, kept)
    expand_chain(session, [0, 1, 2], torch.tensor([[0], [1], [2]]))
    floor, sizes = float(session.acceptance().median()), set[int]()

    def noting(draft: DraftBatch) -> DraftBatch:
        sizes.update(draft.sizes.tolist())
        return draft

    def looking_ahead(draft: DraftBatch) -> DraftBatch:
        count = len(draft.sizes)
        builder, rows = TreeBuilder(count, 1, session.support), torch.arange(count)
        builder.extend(rows, 0, draft.columns[:, 0], rows)
        session.expand(list(range(count)), builder, rows, rows * 0)
        return noting(replace(draft, sizes=(session.acceptance() >= floor).long()))

    right = GROWTHS["acceptance_head"](h=1 - floor, depth=3)
    assert law_of(EnumeratedSteps(session, 2, kept, right, "chain", toy, noting), toy, 4).error < 1e-9
    assert sizes == {2, 3}
    sizes.clear()
    wrong = law_of(EnumeratedSteps(session, 2, kept, GROWTHS["chain"](1), "chain", toy, looking_ahead), toy, 4)
    print(wrong)
    assert sizes == {0, 1}
    assert wrong.error > 1e-3
