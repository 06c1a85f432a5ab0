"""A hundred thousand runs of the engine for what draws in a way of its own, and what must not pass for it."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.config import GROWTH_SETTINGS, DynamicTreeSettings
from osd.drafters import Drafter
from osd.drafters.eagle.drafter import Eagle
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.recall.drafter import Recall
from osd.drafters.recall.session import _by_sequence
from osd.drafters.session import Proposal
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.speculation.verification.draws import LastDrawn
from tests.unit.engine import test_law
from tests.unit.engine.rounds import conditioned
from tests.unit.engine.test_lookahead import looking

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
model = test_law.model
COUNT, BROKEN = 100_000, 20_000


def told_wrongly(*parts: Any) -> LastDrawn:
    """Shares of what was drawn that are a third of the true ones."""
    drawn = _by_sequence(*parts)
    return drawn._replace(q=array("f", [share / 3 for share in drawn.q]))


def recalling(model: LlamaForCausalLM, mixes: bool) -> Drafter:
    torch.manual_seed(2)
    return Mixed(Eagle.from_target(copy.deepcopy(model), 4)) if mixes else Recall()


@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "told wrongly"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("mixes", [False, True], ids=["recall", "mixed"])
def test_candidates_that_recall_draws_leave_the_law_alone(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, mixes: bool, temperature: float, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr("osd.drafters.recall.session._by_sequence", told_wrongly)
    policy, drafter = Policy.of(GROWTH_SETTINGS["best_first"]()), recalling(model, mixes)  # type: ignore[arg-type]
    count, sampling = BROKEN if broken else COUNT, SamplingParams(temperature)
    found = test_law.p_value(model, sampling, policy, count=count, drafter=drafter)
    print(f"p = {found}")
    assert found < 1e-9 if broken else found > 1e-4


SECOND = {
    **{name: test_law.named(name) for name in ("confidence", "block", "siblings", "naive")},
    "traversal": Policy.of(DynamicTreeSettings(budget=4), "traversal"),
}
"""Policies whose drafts often have second tokens; with the threshold of ``test_law`` traversal hardly does."""


@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "conditioned"])
@pytest.mark.parametrize("name", SECOND)
def test_what_one_call_of_a_draft_model_says_leaves_the_law_alone(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, name: str, broken: bool
) -> None:
    if broken and name == "naive":
        pytest.skip("it verifies without a q")
    if broken:
        whole = Proposal.of
        monkeypatch.setattr(Proposal, "of", lambda draft, *more: whole(conditioned(draft), *more))
    drafter, count = looking(copy.deepcopy(model), 2), BROKEN if broken else COUNT
    found = test_law.p_value(model, SamplingParams(1.0), SECOND[name], count=count, drafter=drafter)
    print(f"p = {found}")
    assert found < 1e-9 if broken else found > 1e-4
