"""A hundred thousand runs of the engine for what draws in a way of its own, and what must not pass for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.config import GROWTH_SETTINGS, DynamicTreeSettings
from osd.drafting import Drafter
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.falcon.drafter import Falcon
from osd.drafting.kangaroo import Kangaroo
from osd.drafting.medusa import Medusa
from osd.drafting.mixed import Mixed
from osd.drafting.prompt_tokens.drafter import PromptTokens
from osd.drafting.recall.drafter import Recall
from osd.drafting.session import Proposal
from osd.drafting.token_select import TokenSelect
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.runtime.attention.selection import SelectionSizes
from osd.verification.draws import follow_draws
from tests.unit.drafting.other_tokens import translated
from tests.unit.engine import test_law
from tests.unit.engine.rounds import conditioned
from tests.unit.engine.test_blocks_law import looking

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
model = test_law.model
COUNT, BROKEN = 100_000, 20_000


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
        monkeypatch.setattr(
            "osd.verification.verify.follow_draws",
            lambda logits, drafts, sequences: follow_draws(logits, test_law.told_wrongly(drafts), sequences),
        )
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


def heads(model: LlamaForCausalLM) -> Drafter:
    """Medusa with heads that differ from each other and from the target's."""
    drafter = Medusa(model, 3, 4)
    for parameter in drafter.trained().values():
        parameter.data.normal_(0, 0.1)
    return drafter


def riding(model: LlamaForCausalLM, copies: int) -> Drafter:
    drafter = PromptTokens.from_target(model, 2, copies, 6)
    with torch.no_grad():
        drafter.prompts.normal_(0, 0.3)
    return drafter.add_head()


SELECTION = SelectionSizes(initial=0, top=1, local=1, threshold=0.9)
SOME = ("confidence", "block", "siblings", "traversal", "naive")
KINDS: dict[str, tuple[Callable[[LlamaForCausalLM], Drafter], Sequence[str], Sequence[float]]] = {
    "medusa": (heads, [*test_law.POLICIES], (0.7, 1.0)),
    "kangaroo": (lambda model: Kangaroo.from_target(model, 4, 1), SOME, (0.7, 1.0)),
    "token_select": (lambda model: TokenSelect(SELECTION, 3), SOME, (0.7, 1.0)),
    "falcon, 2": (lambda model: Falcon.from_target(model, 2, 4), [*test_law.POLICIES], (1.0,)),
    "falcon, 4": (lambda model: Falcon.from_target(model, 4, 4), [*test_law.POLICIES], (1.0,)),
    "prompt_tokens": (lambda model: riding(model, 1), [*test_law.POLICIES], (1.0,)),
    "prompt_tokens, copies": (lambda model: riding(model, 2), [*test_law.POLICIES], (1.0,)),
    # It has six tokens of its own, and four of the target's five; the last one it spells with two.
    "other tokens": (
        lambda model: translated(model, [[1], [2], [3], [4], [0, 5]], {0, 1, 2, 3}, 6, noise=0.1), SOME[1:], (1.0,)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "temperature"),
    [
        (kind, name, temperature)
        for kind, (_, names, temperatures) in KINDS.items()
        for name in names
        for temperature in temperatures
    ],
)
def test_in_a_hundred_thousand_runs_no_drafter_changes_the_law(
    model: LlamaForCausalLM, kind: str, name: str, temperature: float
) -> None:
    torch.manual_seed(5)
    drafter = KINDS[kind][0](copy.deepcopy(model))
    found = test_law.p_value(model, SamplingParams(temperature), test_law.named(name), count=COUNT, drafter=drafter)
    assert found > 1e-4
