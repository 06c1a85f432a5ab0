"""Medusa: one call computes all heads from the same state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from osd.config import MedusaSettings
from osd.drafting import initial
from osd.drafting.growth import Stop
from osd.drafting.session import CommittedTokens, Runtime
from osd.runtime.batch import consecutive_rows
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.unit.drafting.sequences import LENGTH, assert_close, at_places, drafting, expand_chain, random_drafter

HEADS = 4


def states_of(target_dir: Path, tokens: list[int], bucketed: bool) -> tuple[Tensor, Tensor]:
    """Return the last layer's states after each of ``tokens`` in an engine, and the target's logits."""
    model = load_model(target_dir, "float32", "cpu")
    slots = SlotModel(model, slots=1, context=64, scratch=8, taps=(-1,), bucketed=bucketed)
    forward = slots.forward(consecutive_rows(0, 0, tokens), torch.arange(len(tokens)))
    return forward.hidden, forward.logits


@pytest.mark.parametrize("bucketed", [False, True])
def test_new_heads_equal_the_target_head(target_dir: Path, bucketed: bool) -> None:
    drafter = initial(MedusaSettings(vocabulary=100_000), target_dir, target_dir)
    tokens = [5, 9, 200, 31, 7, 8]
    hidden, logits = states_of(target_dir, tokens, bucketed)
    assert drafter.needs.taps == (3,)
    levels = drafter.unroll(at_places(torch.tensor([tokens]), hidden[None], [(0, 5)]), HEADS)
    for head, predicted in enumerate(levels):
        assert_close(predicted[0], logits[3 - head], 5e-3)
    session = drafter.session(Runtime(1, LENGTH, 8))
    session.open(0, tokens[0])
    session.commit(0, CommittedTokens([*tokens[1:], 9], hidden))
    for level in range(HEADS):
        assert_close(session.chains([0], [HEADS], Stop()).logits[0, level], logits[-1], 5e-3)


def test_proposal_of_any_depth_is_one_call(target_dir: Path) -> None:
    medusa = random_drafter(MedusaSettings(vocabulary=150, heads=HEADS), target_dir)
    session, calls = drafting(medusa, [3, 0]), []
    for name, layer in session.linear.items():
        layer.register_forward_hook(lambda layer, given, made, name=name: calls.append((name, len(made))))
    expand_chain(session, [3, 0], medusa.draft_ids[torch.ones(2, HEADS - 1, dtype=torch.int64)])
    assert calls == [("weight", 2), ("head", 2)]
