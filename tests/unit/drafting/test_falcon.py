"""Falcon: calls of k tokens, the recurrent part, glancing distillation, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from osd.config import FalconSettings, TrainerSettings
from osd.drafting import initial
from osd.drafting.falcon.drafter import Falcon, glance_ratio, glances
from osd.drafting.falcon.recurrence import recur, scan
from osd.learning.batch import collate
from osd.learning.distiller import Distiller
from osd.learning.objective import DistillationObjective
from tests.unit.drafting.sequences import HIDDEN, at_places, drafting, expand_chain, random_drafter, random_texts
from tests.unit.learning.toys import make_trace

VOCABULARY = 150


@pytest.fixture
def falcon(target_dir: Path) -> Falcon:
    return random_drafter(FalconSettings(vocabulary=VOCABULARY, block=2), target_dir)


@pytest.mark.parametrize("block", [2, 3, 4])
def test_draft_takes_one_call_per_block(target_dir: Path, block: int) -> None:
    falcon, calls = random_drafter(FalconSettings(vocabulary=VOCABULARY, block=block), target_dir), []
    for tokens in (1, 2, 3, 4, 5, 8):
        calls.clear()
        session = drafting(falcon, [3, 0])
        session.linear["head"].register_forward_hook(lambda layer, given, made: calls.append(len(made)))
        expand_chain(session, [3, 0], falcon.draft_ids[torch.ones(2, tokens - 1, dtype=torch.int64)])
        assert calls == [2 * block] * -(-tokens // block)


def test_recurrence_equals_sequential_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    kept, added = (torch.rand(3, 13, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    state = before = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    for place, actual in enumerate(scan(kept, added, before).unbind(1)):
        state = kept[:, place] * state + added[:, place]
        torch.testing.assert_close(actual, state)
    layers = [torch.nn.Linear(6, 8).double(), torch.nn.Linear(4, 8).double()]
    x, before = torch.rand(2, 9, 6, dtype=torch.float64), torch.zeros(2, 2, 4, dtype=torch.float64)
    whole = recur(x, before, layers)
    early = recur(x[:, :5], before, layers)
    torch.testing.assert_close(whole[:, 5:], recur(x[:, 5:], early[:, -1], layers))


def trace_batch(completion: int = 16) -> Any:
    traces = [make_trace(str(seed), prompt=6, completion=completion, seed=seed, width=HIDDEN) for seed in range(2)]
    return collate(traces)


def test_glances_number_follows_the_errors() -> None:
    wrong, usable = torch.ones(3, 20, 4, dtype=torch.bool), torch.ones(3, 20, dtype=torch.bool)
    usable[1] = False
    shown = glances(wrong, usable, 0.25, 7)
    assert not shown[1].any()
    assert set(shown.flatten().tolist()) == {0, 1, 2, 3}  # at least one token per block is learnt
    assert 160 * 0.25 - 3 < int(shown.sum()) <= 160 * 0.25
    assert torch.equal(shown, glances(wrong, usable, 0.25, 7))
    assert not torch.equal(shown, glances(wrong, usable, 0.25, 8))
    assert not glances(~wrong, usable, 0.25, 7).any()


def test_glance_ratio_falls_to_zero() -> None:
    ratios = [glance_ratio(step) for step in (0, 250, 500, 1000, 5000)]
    assert ratios == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.0])


@torch.no_grad()
def test_shown_answer_changes_one_pair_of_its_block(falcon: Falcon) -> None:
    """The first pair of a block becomes the pair of its first token; other blocks do not change."""
    tokens, hidden = random_texts(falcon, 1)
    places = [(0, place) for place in range(8, 20)]
    starts = falcon.starts(at_places(tokens, hidden, places), 2)
    shown = torch.zeros_like(starts.anchors)
    shown[0, 4] = 1
    plain, glancing = (falcon.blocks(starts, 1, None, given)[0] for given in (None, shown))
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(plain[0], glancing[0], strict=True)]
    assert same == [column != 4 for column in range(len(same))]
    anchor = int(starts.anchors[0, 4])
    for change in ("token", "feature", "later"):
        other_tokens, other_hidden = tokens.clone(), hidden.clone()
        if change == "token":
            other_tokens[0, anchor + 1] = tokens[0, anchor + 1] ^ 3
        elif change == "feature":
            other_hidden[0, anchor] += 1
        else:
            other_tokens[0, anchor + 2 :] = 7
            other_hidden[0, anchor + 1 :] += 1
        other = falcon.blocks(falcon.starts(at_places(other_tokens, other_hidden, places), 2), 1, None, shown)
        assert torch.allclose(other[0][0, 4], glancing[0, 4], atol=1e-5) == (change == "later")


def test_shown_answers_are_left_out_of_the_loss(falcon: Falcon, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each first token is shown, only second tokens are learnt, and nothing after such a block."""
    monkeypatch.setattr("osd.drafting.falcon.drafter.glances", lambda wrong, usable, ratio, step: usable.long())
    batch, calls = trace_batch(), []
    falcon.set_vocabulary(torch.arange(VOCABULARY))
    objective = DistillationObjective.of(TrainerSettings(), 0)
    original = DistillationObjective.mean

    def mean(
        self: DistillationObjective, batch: Any, depth: int, values: Tensor, left_out: Tensor | None = None
    ) -> Tensor:
        calls.append((depth, left_out))
        return original(self, batch, depth, values, left_out)

    monkeypatch.setattr(DistillationObjective, "mean", mean)
    falcon.loss(batch, objective)
    off = dict(calls)
    inner = (batch.place > 8) & (batch.place < 17)  # covered by complete blocks
    assert off[0][inner].all()
    assert not off[1].any()
    assert off[2][inner].all()


def test_falcon_learns_a_small_target(target_dir: Path) -> None:
    """The target produces tokens in a fixed order, and its head reads them from its states."""
    torch.manual_seed(5)
    drafter = initial(FalconSettings(vocabulary=16), target_dir, target_dir)
    order, length = [3, 9, 4, 1, 12, 7], 24
    logits = torch.full((16, 16), -4.0)
    for at, token in enumerate(order):
        logits[token, order[(at + 1) % len(order)]] = 4.0
    traces = [
        make_trace(str(seed), prompt=6, completion=length, seed=seed, width=HIDDEN, logits=logits.numpy(), top_k=16)
        for seed in range(3)
    ]
    batch = collate(traces)
    following = torch.arange(259)
    following[order] = torch.tensor(order[1:] + order[:1])
    batch.hidden = drafter.target_head.float()[following[batch.token_ids]]
    distiller = Distiller(drafter, TrainerSettings(learning_rate=1e-2, update_tokens=32))
    before = agreement(drafter, batch)
    for _ in range(12):
        distiller.step(batch)
    after = agreement(drafter, batch)
    assert max(before) < 0.5
    assert min(after) > 0.85, after


@torch.no_grad()
def agreement(drafter: Falcon, batch: Any, depth: int = 4) -> list[float]:
    """Return the share of places whose most probable token is the target's, at each depth."""
    best = batch.target_ids.gather(1, batch.target_logp.argmax(-1, keepdim=True)).squeeze(-1)
    return [
        float((drafter.draft_ids[logits.argmax(-1)] == best).float().mean()) for logits in drafter.unroll(batch, depth)
    ]
