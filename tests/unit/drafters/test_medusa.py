"""Medusa: all heads in one call, each of which reads one state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from osd.config import MedusaSettings
from osd.drafters import initial
from osd.drafters.medusa.drafter import Medusa
from osd.drafters.medusa.session import MedusaSession
from osd.drafters.session import Kept, Runtime
from osd.runtime.batch import following
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.unit.drafters.sequences import at_places, expand_chain

VOCABULARY, LENGTH, HIDDEN, HEADS = 150, 30, 64, 4


@pytest.fixture
def medusa(target_dir: Path) -> Medusa:
    """Random weights that bfloat16 holds exactly, and a draft vocabulary with gaps."""
    drafter = initial(MedusaSettings(vocabulary=VOCABULARY, heads=HEADS), target_dir, target_dir)
    assert isinstance(drafter, Medusa)
    torch.manual_seed(3)
    drafter.adapt_vocabulary(torch.rand(259))
    with torch.no_grad():
        for parameter in drafter.trained().values():
            parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16())
    return drafter


def sequences(medusa: Medusa, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = medusa.draft_ids[torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)]
    return tokens, torch.randn(count, LENGTH, HIDDEN, generator=generator)


def close(got: Tensor, goal: Tensor) -> None:
    """As near as rows that the kernels of some CPUs round to bfloat16."""
    assert float((got.detach() - goal).norm() / goal.norm()) < 5e-3


def drafting(medusa: Medusa, slots: Sequence[int], **runtime: bool) -> MedusaSession:
    """A session with a few rounds behind it, in ``slots``."""
    tokens, hidden = sequences(medusa, len(slots))
    session = medusa.session(Runtime(5, LENGTH, 8, **runtime))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
        session.commit(slot, Kept(tokens[row, 1 : 6 + row].tolist(), hidden[row, : 5 + row]))
    return session


def states_of(target_dir: Path, tokens: list[int], bucketed: bool) -> tuple[Tensor, Tensor]:
    """What the last layer gives after each of ``tokens``, as the engine reads it, and the target's logits."""
    model = load_model(target_dir, "float32", "cpu")
    slots = SlotModel(model, slots=1, context=64, scratch=8, taps=(-1,), bucketed=bucketed)
    forward = slots.forward(following(0, 0, tokens), torch.arange(len(tokens)))
    assert forward.hidden is not None
    return forward.hidden, forward.logits


@pytest.mark.parametrize("bucketed", [False, True])
def test_new_heads_say_what_the_targets_own_head_says_of_the_state_that_it_reads(
    target_dir: Path, bucketed: bool
) -> None:
    drafter = initial(MedusaSettings(vocabulary=100_000), target_dir, target_dir)
    assert isinstance(drafter, Medusa)
    tokens = [5, 9, 200, 31, 7, 8]
    hidden, logits = states_of(target_dir, tokens, bucketed)
    assert drafter.needs.taps == (3,)
    levels = drafter.unroll(at_places(torch.tensor([tokens]), hidden[None], [(0, 5)]), HEADS)
    for head, said in enumerate(levels):
        close(said[0], logits[3 - head])
    session = drafter.session(Runtime(1, LENGTH, 8))
    session.open(0, tokens[0])
    session.commit(0, Kept([*tokens[1:], 9], hidden))
    for level in range(HEADS):
        close(session.chains([0], [HEADS], 0.0).logits[0, level], logits[-1])


def test_a_proposal_is_one_call_however_deep_it_is(medusa: Medusa) -> None:
    session, calls = drafting(medusa, [3, 0]), []
    for name, layer in session.linear.items():
        layer.register_forward_hook(lambda layer, given, made, name=name: calls.append((name, len(made))))
    expand_chain(session, [3, 0], medusa.draft_ids[torch.ones(2, HEADS - 1, dtype=torch.int64)])
    assert calls == [("weight", 2), ("head", 2)]
