"""Every kind of drafter with every growth policy: it works and changes no output, or is refused in one sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.config import (
    DRAFTER_SETTINGS,
    GROWTH_SETTINGS,
    ConfigError,
    EagleSettings,
    EarlyExitSettings,
    FalconSettings,
    GrowthSettings,
    KangarooSettings,
    LanguageModelSettings,
    MedusaSettings,
    MixedSettings,
    PromptTokensSettings,
    RecallDrafterSettings,
    TokenSelectSettings,
    load_settings,
)
from osd.config.drafter import DrafterSettings
from osd.drafters import Drafter, Trainable, initial
from osd.drafters.acceptance_head import WithAcceptanceHead
from osd.drafters.eagle.drafter import Eagle
from osd.drafters.early_exit.drafter import EarlyExit
from osd.drafters.falcon.drafter import Falcon
from osd.drafters.kangaroo.drafter import Kangaroo
from osd.drafters.language_model.drafter import LanguageModel
from osd.drafters.medusa.drafter import Medusa
from osd.drafters.mixed.drafter import Mixed
from osd.drafters.prompt_tokens.drafter import PromptTokens
from osd.drafters.recall.drafter import Recall
from osd.drafters.token_select.drafter import TokenSelect
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.runtime.attention.selection import SelectionSizes
from tests.unit.engine import test_law
from tests.unit.engine.harness import Oracle, prompts, running

LENGTHS = (5, 17, 3)
GROWTHS: dict[str, dict[str, object]] = {
    "best_first": {"budget": 6},
    "chain": {"depth": 3},
    "confidence": {"depth": 3, "eta": 0.3},
    "heuristic": {"depth": 3, "start": 1},
    "acceptance_head": {"depth": 3, "h": 0.6},
    "dynamic_tree": {"budget": 5},
    "static_tree": {"budget": 5, "depth": 2},
    "sparse_tree": {"budget": 5, "ranks": ((0.6, 0.2), (0.5, 0.2), (0.4,))},
    "top_k_tree": {"budget": 5, "depth": 2, "top_k": 2},
}
SETTINGS: dict[str, DrafterSettings] = {
    "eagle": EagleSettings(vocabulary=200),
    "early_exit": EarlyExitSettings(vocabulary=200),
    "falcon": FalconSettings(vocabulary=200),
    "kangaroo": KangarooSettings(vocabulary=200, exit_layer=1),
    "language_model": LanguageModelSettings(layers=2),
    "language_model, prompted": LanguageModelSettings(layers=2, prompt_tokens=2),
    "medusa": MedusaSettings(vocabulary=200),
    "prompt_tokens": PromptTokensSettings(),
    "recall": RecallDrafterSettings(),
    "mixed": MixedSettings(),
    "token_select": TokenSelectSettings(top=2, initial=1, local=2),
}


def policies(kind: str) -> list[Policy]:
    """All that go with a kind of drafter."""
    made: list[GrowthSettings] = [
        GROWTH_SETTINGS[name](**given) for name, given in GROWTHS.items() if refusal(kind, name) is None
    ]
    return [Policy.of(one) for one in made]


def refusal(kind: str, growth: str) -> str | None:
    """What the one who configures both is told, None where they go together."""
    given = {"growth": {"kind": growth, **GROWTHS[growth]}, "drafter": {"kind": kind.partition(",")[0]}}
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(given, file)
        file.flush()
        try:
            load_settings(Path(file.name), [], {})
        except ConfigError as error:
            return str(error).replace(f" ({file.name})", "")
    return None


def test_every_kind_and_every_growth_policy_is_here() -> None:
    assert GROWTHS.keys() == GROWTH_SETTINGS.keys()
    assert {kind.partition(",")[0] for kind in SETTINGS} | {"none"} == DRAFTER_SETTINGS.keys()


def test_what_nobody_would_ask_is_refused_when_the_configuration_is_read() -> None:
    refused = {(kind, growth) for kind in SETTINGS for growth in GROWTHS if refusal(kind, growth) is not None}
    why = {
        "recall": "drafts of drafter.kind recall go where recall does",
        "mixed": "drafts of drafter.kind mixed go where recall does",
        "token_select": "drafter.kind token_select trains none",
    }
    assert refused == {(kind, "acceptance_head") for kind in why}
    for kind, growth in refused:
        assert (
            refusal(kind, growth) == f"growth.kind must be one that asks no head, as {why[kind]}, not acceptance_head"
        )


def served(kind: str, directory: Path) -> Drafter:
    torch.manual_seed(4)
    settings = SETTINGS[kind]
    drafter = initial(settings, directory, directory)
    drafter = WithAcceptanceHead(drafter) if isinstance(drafter, Trainable) else drafter
    return Mixed(drafter) if settings.mixes else drafter


@pytest.mark.parametrize("kind", SETTINGS)
def test_greedy_text_is_that_of_transformers_with_every_growth_policy(
    target_dir: Path, oracle: Oracle, kind: str
) -> None:
    goals = [oracle.greedy(prompt, 12) for prompt in prompts(LENGTHS)]
    with running(target_dir, drafter=served(kind, target_dir), slots=8) as client:
        for policy in policies(kind):
            for index, prompt in enumerate(prompts(LENGTHS)):
                name = f"{policy.growth.name} {index}"
                client.submit(name, prompt, 12, ignore_eos=True, capture=True, policy=policy)
        for name, result in client.wait().items():
            assert result.tokens == goals[int(name.split()[-1])], name
            assert result.error is None
        counters = client.engine.counters()
    assert counters.failed == 0
    assert counters.speculation().drafted > counters.speculation().accepted > 0


def noisy(drafter: Trainable) -> Drafter:
    """With numbers of its own, and a head that is no longer sure of nothing."""
    drafter = WithAcceptanceHead(drafter)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
    return drafter


def looking(model: LlamaForCausalLM) -> LanguageModel:
    model.config.max_position_embeddings = 256
    return LanguageModel.first_layers(model, 1, 2)


LAWS: dict[str, Callable[[LlamaForCausalLM], Drafter]] = {
    "eagle": lambda model: noisy(Eagle.from_target(model, 4)),
    "early_exit": lambda model: noisy(EarlyExit(model, 4)),
    "falcon": lambda model: noisy(Falcon.from_target(model, 2, 4)),
    "kangaroo": lambda model: noisy(Kangaroo.from_target(model, 4, 1)),
    "language_model": lambda model: noisy(LanguageModel.first_layers(model, 1)),
    "language_model, prompted": lambda model: noisy(looking(model)),
    "medusa": lambda model: noisy(Medusa(model, 3, 4)),
    "prompt_tokens": lambda model: noisy(PromptTokens.from_target(model, 3, 1, 8)),
    "recall": lambda model: Recall(),
    "mixed": lambda model: Mixed(Eagle.from_target(model, 4)),
    "token_select": lambda model: TokenSelect(SelectionSizes(initial=1, top=1, local=1, threshold=0.9), 3),
}

model = test_law.model


@pytest.mark.parametrize("kind", LAWS)
def test_the_law_of_the_output_is_the_targets_where_requests_ask_for_every_growth_policy(
    model: LlamaForCausalLM, kind: str
) -> None:
    torch.manual_seed(5)
    drafter = LAWS[kind](copy.deepcopy(model))
    assert test_law.p_value(model, SamplingParams(1.0), policies(kind), count=900, drafter=drafter) > 1e-4
