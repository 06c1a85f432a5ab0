"""Output distribution with each kind of drafter in 100,000 runs, and detection of wrong distributions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.config import GROWTH_SETTINGS, DynamicTreeSettings
from osd.drafting import Drafter
from osd.drafting.dspark.drafter import DSpark
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
from tests.unit.engine import test_distribution
from tests.unit.engine.steps import conditioned
from tests.unit.engine.test_block_drafters import prompted_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
model = test_distribution.model
COUNT, BROKEN = 100_000, 20_000


def recall_drafter(model: LlamaForCausalLM, mixes: bool) -> Drafter:
    torch.manual_seed(2)
    return Mixed(Eagle.from_target(copy.deepcopy(model), 4)) if mixes else Recall()


@pytest.mark.parametrize("broken", [False, True], ids=["correct", "wrong q"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("mixes", [False, True], ids=["recall", "mixed"])
def test_drawn_recall_drafts_keep_the_distribution_in_long_runs(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, mixes: bool, temperature: float, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr(
            "osd.verification.verify.follow_draws",
            lambda logits, drafts, sequences: follow_draws(logits, test_distribution.with_wrong_q(drafts), sequences),
        )
    policy, drafter = Policy.of(GROWTH_SETTINGS["best_first"]()), recall_drafter(model, mixes)  # type: ignore[arg-type]
    count, sampling = BROKEN if broken else COUNT, SamplingParams(temperature)
    p = test_distribution.p_value(model, sampling, policy, count=count, drafter=drafter)
    print(f"p = {p}")
    assert p < 1e-9 if broken else p > 1e-4


SECOND = {
    **{name: test_distribution.policy_named(name) for name in ("confidence", "block", "siblings", "naive")},
    "traversal": Policy.of(DynamicTreeSettings(budget=4), "traversal"),
}
"""Policies whose drafts often have second tokens, unlike traversal with the threshold of ``test_distribution``."""


@pytest.mark.parametrize("broken", [False, True], ids=["correct", "conditioned"])
@pytest.mark.parametrize("name", SECOND)
def test_prompted_draft_model_keeps_the_distribution(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, name: str, broken: bool
) -> None:
    if broken and name == "naive":
        pytest.skip("it verifies without a q")
    if broken:
        whole = Proposal.of
        monkeypatch.setattr(Proposal, "of", lambda draft, *more: whole(conditioned(draft), *more))
    drafter, count = prompted_model(copy.deepcopy(model), 2), BROKEN if broken else COUNT
    p = test_distribution.p_value(model, SamplingParams(1.0), SECOND[name], count=count, drafter=drafter)
    print(f"p = {p}")
    assert p < 1e-9 if broken else p > 1e-4


def heads(model: LlamaForCausalLM) -> Drafter:
    """Return Medusa with random heads."""
    drafter = Medusa(model, 3, 4)
    for parameter in drafter.trained().values():
        parameter.data.normal_(0, 0.1)
    return drafter


def block_drafter(model: LlamaForCausalLM) -> Drafter:
    """Return DSpark with a random Markov head and a random acceptance head."""
    drafter = DSpark.from_target(model, 3, 2, 4, 4).add_head()
    with torch.no_grad():
        drafter.markov_out.weight.normal_(0, 0.5)
        for weight in drafter.acceptance.parameters():
            weight.normal_(0, 0.3)
    return drafter


def prompt_tokens_drafter(model: LlamaForCausalLM, copies: int) -> Drafter:
    drafter = PromptTokens.from_target(model, 2, copies, 6)
    with torch.no_grad():
        drafter.prompts.normal_(0, 0.3)
    return drafter.add_head()


SELECTION = SelectionSizes(initial=0, top=1, local=1, threshold=0.9)
SOME = ("confidence", "block", "siblings", "traversal", "naive")
KINDS: dict[str, tuple[Callable[[LlamaForCausalLM], Drafter], Sequence[str], Sequence[float]]] = {
    "medusa": (heads, [*test_distribution.POLICIES], (0.7, 1.0)),
    "kangaroo": (lambda model: Kangaroo.from_target(model, 4, 1), SOME, (0.7, 1.0)),
    "token_select": (lambda model: TokenSelect(SELECTION, 3), SOME, (0.7, 1.0)),
    "dspark": (block_drafter, [*test_distribution.POLICIES], (0.7, 1.0)),
    "falcon, 2": (lambda model: Falcon.from_target(model, 2, 4), [*test_distribution.POLICIES], (1.0,)),
    "falcon, 4": (lambda model: Falcon.from_target(model, 4, 4), [*test_distribution.POLICIES], (1.0,)),
    "prompt_tokens": (lambda model: prompt_tokens_drafter(model, 1), [*test_distribution.POLICIES], (1.0,)),
    "prompt_tokens, copies": (lambda model: prompt_tokens_drafter(model, 2), [*test_distribution.POLICIES], (1.0,)),
    # The drafter has six tokens. It shares four of the target's five, and spells the last one with two tokens.
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
def test_drafters_keep_the_distribution_in_long_runs(
    model: LlamaForCausalLM, kind: str, name: str, temperature: float
) -> None:
    torch.manual_seed(5)
    drafter = KINDS[kind][0](copy.deepcopy(model))
    p = test_distribution.p_value(
        model, SamplingParams(temperature), test_distribution.policy_named(name), count=COUNT, drafter=drafter
    )
    assert p > 1e-4
