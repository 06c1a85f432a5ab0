"""DSpark: one call for a block, children that depend on their parent, first versions, and training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from osd.config import DSparkSettings, TrainerSettings
from osd.drafting import DrafterError, from_config, initial
from osd.drafting.dspark.drafter import DSpark, mask_id
from osd.drafting.dspark.initial import sizes_of_heads
from osd.drafting.session import CommittedTokens, Runtime
from osd.learning.batch import collate
from osd.learning.distiller import Distiller
from osd.learning.objective import DistillationObjective
from osd.target.model import load_model
from osd.verification.tree import ROOT, TreeBuilder
from tests.tiny import make_tiny
from tests.unit.drafting.sequences import (
    HIDDEN,
    assert_close,
    at_places,
    drafting,
    expand_chain,
    expand_tree,
    random_drafter,
    random_texts,
)
from tests.unit.learning.toys import make_trace

VOCABULARY, BLOCK = 150, 4
PLACES = [(0, place) for place in range(8, 16)]


@pytest.fixture
def dspark(target_dir: Path) -> DSpark:
    return random_drafter(DSparkSettings(vocabulary=VOCABULARY), target_dir)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_draft_of_any_length_takes_one_call(dspark: DSpark, tokens: int) -> None:
    session, calls = drafting(dspark, [3, 0]), []
    session.linear["head"].register_forward_hook(lambda layer, given, made: calls.append(len(made)))
    expand_chain(session, [3, 0], dspark.draft_ids[torch.ones(2, tokens - 1, dtype=torch.int64)])
    assert calls == [2 * min(BLOCK, tokens + 1)]


@torch.no_grad()
def test_shorter_block_gives_equal_logits(dspark: DSpark, target_dir: Path) -> None:
    batch = at_places(*random_texts(dspark, 1), PLACES)
    whole = dspark.unroll(batch, BLOCK)
    assert len(dspark.unroll(batch, BLOCK + 3)) == BLOCK
    for size in range(1, BLOCK):
        short = from_config({**dspark.config(), "block": size}, target_dir)
        short.load_weights(dspark.weights())
        for drafter in (dspark, short):
            for actual, expected in zip(drafter.unroll(batch, size), whole[:size], strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_children_differ_by_the_bias_of_their_parents(dspark: DSpark) -> None:
    first, second = dspark.draft_ids[[3, 70]].tolist()
    logits = expand_tree(drafting(dspark, [1]), 1, [first, second], [-1, -1])
    rows = dspark.markov_in.weight[[first, second]]
    bias = dspark.markov_out(rows)
    assert float((bias[0] - bias[1]).norm()) > 1
    assert_close(logits[1] - logits[2], bias[0] - bias[1], 1e-2)


@torch.no_grad()
def test_new_markov_head_adds_nothing(target_dir: Path) -> None:
    drafter = initial(DSparkSettings(vocabulary=VOCABULARY), target_dir, target_dir)
    tokens, hidden = random_texts(drafter, 1)
    batch, other = at_places(tokens, hidden, PLACES), tokens.flip(1)
    for actual, expected in zip(drafter.unroll(batch, BLOCK, other), drafter.unroll(batch, BLOCK), strict=True):
        assert torch.equal(actual, expected)
    size = drafter.markov_in.weight.pow(2).mean().sqrt()
    assert float(size) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("layers", [1, 2])
def test_first_version_copies_the_last_target_layers(target_dir: Path, layers: int) -> None:
    drafter = initial(DSparkSettings(vocabulary=VOCABULARY, layers=layers), target_dir, target_dir)
    target, weights = load_model(target_dir, "float32", "cpu"), drafter.weights()
    state, sizes = target.state_dict(), sizes_of_heads(target, range(4 - layers, 4), 16)
    assert len(sizes) == 2 * layers
    for number in range(layers):
        theirs = f"model.layers.{4 - layers + number}"
        assert torch.equal(weights[f"layers.{number}.q_proj.weight"], state[f"{theirs}.self_attn.q_proj.weight"])
        assert torch.equal(weights[f"layers.{number}.down_proj.weight"], state[f"{theirs}.mlp.down_proj.weight"])
        for name in ("q_norm", "k_norm"):
            size = torch.full((16,), sizes[4 - layers + number, name])
            torch.testing.assert_close(weights[f"layers.{number}.{name}.weight"], size, rtol=1e-4, atol=0)
    norms = torch.stack([state[f"model.layers.{4 - layers + n}.input_layernorm.weight"] for n in range(layers)])
    torch.testing.assert_close(weights["context_norm.weight"], norms.mean(0))


@torch.no_grad()
def test_sizes_of_heads_follow_the_projection(target_dir: Path) -> None:
    target: Any = load_model(target_dir, "float32", "cpu")
    before = sizes_of_heads(target, [3], 16)
    target.model.layers[3].self_attn.q_proj.weight *= 3
    after = sizes_of_heads(target, [3], 16)
    assert before.keys() == {(3, "q_norm"), (3, "k_norm")}
    assert after[3, "q_norm"] == pytest.approx(3 * before[3, "q_norm"], rel=1e-4)
    assert after[3, "k_norm"] == pytest.approx(before[3, "k_norm"], rel=1e-4)


def test_target_of_two_layers_is_refused(tmp_path: Path) -> None:
    message = "^drafter.kind dspark needs a target of at least 3 layers, this one has 2$"
    with pytest.raises(DrafterError, match=message):
        initial(DSparkSettings(), make_tiny(tmp_path, layers=2), tmp_path)


def test_mask_is_the_highest_row_that_is_not_zero() -> None:
    embedding = torch.randn(6, 3)
    assert mask_id(embedding) == 5
    embedding[4:] = 0
    assert mask_id(embedding) == 3


@torch.no_grad()
def test_markov_rows_follow_their_ids(dspark: DSpark) -> None:
    before = dict(zip(dspark.draft_ids.tolist(), dspark.markov_out.weight.clone(), strict=True))
    dspark.adapt_vocabulary(torch.rand(259, generator=torch.Generator().manual_seed(7)))
    after = dict(zip(dspark.draft_ids.tolist(), dspark.markov_out.weight, strict=True))
    kept = before.keys() & after.keys()
    assert 0 < len(kept) < VOCABULARY
    assert all(torch.equal(after[token], before[token]) for token in kept)
    assert not any(after[token].any() for token in after.keys() - kept)


def trace_batch(completion: int = 16) -> Any:
    traces = [make_trace(str(n), prompt=5 + n, completion=completion, seed=n, width=3 * HIDDEN) for n in range(2)]
    return collate(traces)


class NotedLoss(DistillationObjective):
    """Objective that notes the positions that each place of the blocks leaves out."""

    noted: ClassVar[list[list[Tensor]]] = []

    def loss(self, batch: Any, levels: Any, draft_ids: Any, left_out: Any = None) -> Any:
        self.noted.append(left_out)
        return super().loss(batch, levels, draft_ids, left_out)


def noted_loss(drafter: DSpark, batch: Any) -> tuple[float, Tensor]:
    """Return the loss of a drafter, and whether [N, block] each position is left out at each place of a block."""
    NotedLoss.noted.clear()
    loss = drafter.loss(batch, NotedLoss.of(TrainerSettings(negatives=0), 0))
    return float(loss.value.detach()), torch.stack(NotedLoss.noted[0], 1)


def test_loss_counts_each_place_of_the_chosen_blocks(dspark: DSpark, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = trace_batch()
    first = torch.tensor([5, 6])[batch.sequence]
    value, left_out = noted_loss(dspark, batch)
    before_answer = torch.stack([batch.place - k < first for k in range(BLOCK)], 1)
    assert torch.equal(left_out, before_answer)
    with torch.no_grad():
        objective, levels = DistillationObjective.of(TrainerSettings(), 0), dspark.unroll(batch, BLOCK)
        goal = objective.loss(batch, levels, dspark.draft_ids, before_answer.unbind(1)).value
    assert value == pytest.approx(float(goal), rel=1e-5)
    monkeypatch.setattr("osd.drafting.dspark.drafter._MOST_STARTS", 3)
    few, left_out = noted_loss(dspark, batch)
    assert few != pytest.approx(value, rel=1e-5)
    counts = (~left_out).sum(0).tolist()
    assert counts[0] == 3
    assert counts == sorted(counts, reverse=True)


def test_loss_trains_every_weight_and_no_row_of_the_target(dspark: DSpark) -> None:
    dspark.loss(trace_batch(), DistillationObjective.of(TrainerSettings(), 0)).value.backward()
    gradients = {name: weight.grad for name, weight in dspark.trained().items()}
    assert {name for name, gradient in gradients.items() if gradient is None or not gradient.any()} == set()
    assert not any("final_norm" in name or name in ("rows", "embedding") for name in gradients)
    rows = gradients["markov_in.weight"].abs().sum(-1).nonzero().flatten().tolist()
    assert set(rows) <= set(trace_batch().token_ids.flatten().tolist())


def test_dspark_learns_a_small_target(target_dir: Path) -> None:
    """The target produces tokens in a fixed order, whatever its states are."""
    torch.manual_seed(5)
    drafter = initial(DSparkSettings(vocabulary=16, rank=16), target_dir, target_dir)
    order, length = [3, 9, 4, 1, 12, 7], 24
    logits = torch.full((16, 16), -4.0)
    for at, token in enumerate(order):
        logits[token, order[(at + 1) % len(order)]] = 4.0
    traces = [
        make_trace(str(seed), prompt=6, completion=length, seed=seed, width=3 * HIDDEN, logits=logits.numpy(), top_k=16)
        for seed in range(3)
    ]
    batch = collate(traces)
    distiller = Distiller(drafter, TrainerSettings(learning_rate=1e-2, update_tokens=32))
    before = agreement(drafter, batch)
    for _ in range(40):
        assert not distiller.step(batch).skipped
    after = agreement(drafter, batch)
    print(before, after)
    assert max(before) < 0.5
    assert min(after) > 0.85


@torch.no_grad()
def agreement(drafter: DSpark, batch: Any) -> list[float]:
    """Return the share of places whose most probable token is the target's, at each place of a block."""
    best = batch.target_ids.gather(1, batch.target_logp.argmax(-1, keepdim=True)).squeeze(-1)
    levels = drafter.unroll(batch, BLOCK)
    return [float((drafter.draft_ids[logits.argmax(-1)] == best).float().mean()) for logits in levels]


@torch.no_grad()
def test_head_state_reads_no_token_after_its_own(dspark: DSpark) -> None:
    """The state of a token is the same for every token before it and after it."""
    tokens, hidden = random_texts(dspark, 1)
    batch, fed = at_places(tokens, hidden, [(0, 12)]), tokens[0, :1]
    states = dspark.drafted_states(batch, fed, BLOCK - 1)
    for depth, state in enumerate(states, 1):
        other = tokens.clone()
        other[0, 12 - depth + 1 :] = tokens[0].flip(0)[12 - depth + 1 :]
        changed = hidden.clone()
        changed[0, 12 - depth :] += 1
        again = dspark.drafted_states(dataclasses.replace(batch, token_ids=other, hidden=changed), fed, BLOCK - 1)
        torch.testing.assert_close(again[depth - 1], state)


@torch.no_grad()
def test_block_ends_at_the_places_of_its_slot(dspark: DSpark) -> None:
    """A slot has room for a draft of one token, although the tree and the block could be larger."""
    tokens, hidden = random_texts(dspark, 1)
    session, context = dspark.session(Runtime(1, 6, 2)), 6
    session.open(0, int(tokens[0, 0]))
    session.commit(0, CommittedTokens(tokens[0, 1:context].tolist(), hidden[0, : context - 1]))
    builder, root = TreeBuilder(1, 8, session.support), torch.zeros(1, dtype=torch.int64)
    logits = session.expand([0], builder, root, root + ROOT)
    goal = dspark.unroll(at_places(tokens, hidden, [(0, context)]), 1)[0]
    assert_close(logits, goal, 0.02)
