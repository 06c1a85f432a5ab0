"""Contract of every kind of drafter in the engine, with every compatible growth policy."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from osd.capture.trace import Trace
from osd.config import (
    DRAFTER_SETTINGS,
    GROWTH_SETTINGS,
    TRAINED_SETTINGS,
    BestFirstSettings,
    ChainSettings,
    ConfigError,
    DSparkSettings,
    DynamicTreeSettings,
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
    TrainerSettings,
    load_settings,
)
from osd.config.drafter import DrafterSettings
from osd.drafting import Drafter, DrafterError, Trainable, initial
from osd.drafting.dspark.drafter import DSpark
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.early_exit import EarlyExit
from osd.drafting.falcon.drafter import Falcon
from osd.drafting.kangaroo import Kangaroo
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.medusa import Medusa
from osd.drafting.mixed import Mixed
from osd.drafting.prompt_tokens.drafter import PromptTokens
from osd.drafting.recall.drafter import Recall
from osd.drafting.token_select import TokenSelect
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.learning.batch import collate, pack
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.metrics import SpeculationCounts
from osd.registry.pointer import Rollout
from osd.runtime.attention.selection import SelectionSizes
from osd.verification import VERIFICATIONS
from tests.tiny import HIDDEN
from tests.unit.engine import test_distribution
from tests.unit.engine.harness import LENGTHS, Client, prompts, running
from tests.unit.engine.test_block_drafters import prompted_model

GROWTHS: dict[str, dict[str, object]] = {
    "best_first": {"budget": 6},
    "chain": {"depth": 3},
    "confidence": {"depth": 3, "eta": 0.05},
    "heuristic": {"depth": 3, "start": 1},
    "acceptance_head": {"depth": 3, "h": 0.6},
    "dynamic_tree": {"budget": 5},
    "static_tree": {"budget": 5, "depth": 2},
    "sparse_tree": {"budget": 5, "ranks": ((0.6, 0.2), (0.5, 0.2), (0.4,))},
    "top_k_tree": {"budget": 5, "depth": 2, "top_k": 2},
}
SETTINGS: dict[str, DrafterSettings] = {
    "dspark": DSparkSettings(vocabulary=200),
    "eagle": EagleSettings(vocabulary=200),
    "early_exit": EarlyExitSettings(vocabulary=200),
    "falcon": FalconSettings(vocabulary=200),
    "kangaroo": KangarooSettings(vocabulary=200),
    "language_model": LanguageModelSettings(layers=2),
    "language_model, prompted": LanguageModelSettings(layers=2, prompt_tokens=2),
    "medusa": MedusaSettings(vocabulary=200),
    "prompt_tokens": PromptTokensSettings(),
    "prompt_tokens, few rows": PromptTokensSettings(copies=2, rows=8),  # too few for all prompt tokens at every node
    "recall": RecallDrafterSettings(),
    "mixed": MixedSettings(),
    "token_select": TokenSelectSettings(top=2, initial=1, local=2),
}
TRAINED = [
    kind for kind in SETTINGS if kind.partition(",")[0] in TRAINED_SETTINGS and kind != "prompt_tokens, few rows"
]
MORE = [Policy.of(DynamicTreeSettings(budget=6, threshold=0.1))]
"""Policies of other algorithms than those of ``GROWTHS``."""


def policies(kind: str) -> list[Policy]:
    """Return all policies that are compatible with a kind of drafter."""
    made: list[GrowthSettings] = [
        GROWTH_SETTINGS[name](**fields) for name, fields in GROWTHS.items() if refusal(kind, name) is None
    ]
    return [Policy.of(growth) for growth in made]


def refusal(kind: str, growth: str) -> str | None:
    """Return the configuration error for both, None if they are compatible."""
    configuration = {"growth": {"kind": growth, **GROWTHS[growth]}, "drafter": {"kind": kind.partition(",")[0]}}
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(configuration, file)
        file.flush()
        try:
            load_settings(Path(file.name), [], {})
        except ConfigError as error:
            return str(error).replace(f" ({file.name})", "")
    return None


def test_tables_have_every_drafter_and_growth_policy() -> None:
    assert GROWTHS.keys() == GROWTH_SETTINGS.keys()
    assert {kind.partition(",")[0] for kind in SETTINGS} | {"none"} == DRAFTER_SETTINGS.keys()


def test_incompatible_drafter_and_growth_are_refused() -> None:
    refused = {(kind, growth) for kind in SETTINGS for growth in GROWTHS if refusal(kind, growth) is not None}
    why = {
        "recall": "recall decides where its drafts grow",
        "mixed": "recall decides where its drafts grow",
        "token_select": "it trains no head",
    }
    assert refused == {(kind, "acceptance_head") for kind in why}
    for kind, growth in refused:
        rule = f"must be a policy without an acceptance head for drafter.kind {kind}: {why[kind]}"
        assert refusal(kind, growth) == f"growth.kind {rule}, not acceptance_head"


def trained(kind: str, directory: Path) -> Trainable:
    torch.manual_seed(4)
    drafter = initial(SETTINGS[kind], directory, directory)
    assert isinstance(drafter, Trainable)
    return drafter


def served(kind: str, directory: Path) -> Drafter:
    torch.manual_seed(4)
    settings = SETTINGS[kind]
    drafter = initial(settings, directory, directory)
    if settings.mixes:
        return Mixed(drafter)
    return drafter.add_head() if isinstance(drafter, Trainable) else drafter


def ask(client: Client, name: str, tokens: int = 12, lengths: Sequence[int] = LENGTHS, **more: Any) -> None:
    for index, prompt in enumerate(prompts(lengths)):
        client.submit(f"{name} {index}", prompt, tokens, **{"ignore_eos": True, "capture": True, **more})


def check_greedy(client: Client, goals: list[list[int]]) -> SpeculationCounts:
    """Wait for all answers, compare them with transformers, and return the draft counts."""
    for name, result in client.wait().items():
        assert result.error is None, name
        assert result.tokens == goals[int(name.split()[-1])][: len(result.tokens)], name
    counters = client.settled()
    assert counters.failed == 0
    return counters.speculation()


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucketed": {"bucketed": True},
    "few slots": {"prefix_cache": False, "slots": 2, "chunk": 5},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", SETTINGS)
def test_greedy_text_of_every_growth_policy_matches_transformers(
    target_dir: Path, goals: list[list[int]], kind: str, how: str
) -> None:
    """Requests without a policy are governed."""
    options = {"slots": 8, "growth": BestFirstSettings(budget=8), **HOW[how]}
    with running(target_dir, drafter=served(kind, target_dir), **options) as client:
        for number, policy in enumerate([None, *policies(kind), *MORE]):
            ask(client, f"{number}", policy=policy)
        counts = check_greedy(client, goals)
    name = kind.partition(",")[0]
    recall = {"recall", "request", "copy"}
    assert counts.by_source.keys() <= {"recall": recall, "mixed": recall | {"eagle"}}.get(name, {name})
    assert counts.drafted > counts.accepted > 0


@pytest.mark.parametrize("kind", SETTINGS)
def test_repeatable_text_matches_plain_decoding(target_dir: Path, kind: str) -> None:
    prompt, sampling = prompts([21], seed=6)[0], SamplingParams(1.0, seed=77, repeatable=True)
    ways = [*policies(kind), *(Policy.of(ChainSettings(depth=3), rule) for rule in VERIFICATIONS)]
    with running(target_dir, drafter=served(kind, target_dir), slots=8) as client:
        client.submit("plain", prompt, 20, sampling, ignore_eos=True, speculate=False)
        for turn in range(2 if kind in ("recall", "mixed") else 1):  # in the second turn they recall the text
            for number, policy in enumerate(ways):
                client.submit(f"{turn} {number}", prompt, 20, sampling, ignore_eos=True, capture=True, policy=policy)
            results = client.wait()
        counts = client.settled().speculation()
    assert {tuple(result.tokens) for result in results.values()} == {tuple(results["plain"].tokens)}
    assert counts.drafted > counts.accepted > 0


@pytest.mark.parametrize(
    ("kind", "bucketed"),
    [*((kind, False) for kind in TRAINED), *((kind, True) for kind in TRAINED if kind not in ("falcon", "early_exit"))],
)
def test_mixed_drafter_keeps_greedy_text(target_dir: Path, goals: list[list[int]], kind: str, bucketed: bool) -> None:
    drafter, fits = Mixed(trained(kind, target_dir)), Policy.of(BestFirstSettings(budget=8, governed=False))
    with running(target_dir, drafter=drafter, growth=BestFirstSettings(), slots=8, bucketed=bucketed) as client:
        for turn in range(2):
            for name, policy in (("governed", None), ("fits", fits), ("chain", Policy.of(ChainSettings(depth=4)))):
                ask(client, f"{name} {turn}", 24, policy=policy)
            counts = check_greedy(client, goals)
    name = kind.partition(",")[0]
    assert counts.by_source.keys() <= {"recall", "request", "copy", name}
    assert counts.by_source[name].drafted > 0
    assert counts.by_source["recall"].accepted > 0


@pytest.mark.parametrize("kind", TRAINED)
def test_stage_of_invalid_weights_is_refused(target_dir: Path, goals: list[list[int]], kind: str) -> None:
    drafter, other = trained(kind, target_dir), trained("medusa" if kind == "eagle" else "eagle", target_dir)
    weights = drafter.weights()
    name = next(name for name, value in weights.items() if value.dim() > 1)
    with running(target_dir, drafter=drafter) as client:
        with pytest.raises(DrafterError, match=r"tensor '.+' is (missing|unknown)"):
            client.engine.stage(2, other.weights())
        with pytest.raises(DrafterError, match=rf"'{re.escape(name)}' has shape \[1, 1\] instead of"):
            client.engine.stage(2, {**weights, name: torch.zeros(1, 1)})
        ask(client, "r")
        check_greedy(client, goals)
        assert client.engine.drafter_version == 1


def start_requests(client: Client, name: str) -> None:
    """Submit greedy requests with chains and trees, and wait until they have begun."""
    for index, policy in enumerate((None, Policy.of(BestFirstSettings()))):
        client.submit(f"{name} {index}", prompts(LENGTHS)[index], 24, ignore_eos=True, capture=True, policy=policy)
    for index in range(2):
        client.until(f"{name} {index}", 1)


@pytest.mark.parametrize("mixes", [False, True], ids=["alone", "with recall"])
def test_changes_of_drafter_kind_keep_requests_and_text(target_dir: Path, goals: list[list[int]], mixes: bool) -> None:
    """Change from each kind to the next, and to and from the first kind; every second change starts as a canary."""
    drafters: dict[str, Drafter] = {kind: trained(kind, target_dir) for kind in TRAINED}
    if mixes:
        drafters = {kind: Mixed(trained(kind, target_dir)) for kind in TRAINED}
    first, *rest = TRAINED
    route = [*rest, first, *(kind for other in rest[1:] for kind in (other, first))]
    needs, traces = drafters["prompt_tokens"].needs, list[Trace]()
    room = {"riders": needs.riders, "embeddings": needs.embeddings}
    with running(target_dir, drafter=drafters[first], slots=6, traces=traces, **room) as client:
        handle = client.engine.drafters("general")
        for version, kind in enumerate(route, 2):
            drafter = drafters[kind]
            start_requests(client, f"before {version}")
            if version % 2:
                handle.try_canary(Rollout(version - 1, version, 1.0, 1.0), drafter.weights(), drafter)
                start_requests(client, f"canary {version}")
            handle.stage(version, drafter.weights(), drafter)
            client.swapped_to(version)
            handle.end_canary()
        start_requests(client, "in the end")
        results = client.wait()
        counts = check_greedy(client, goals)
        counters = client.settled()
    assert {(result.finish, len(result.tokens)) for result in results.values()} == {("length", 24)}
    assert (counters.cancelled, counters.swaps) == (0, len(route))
    names = {kind.partition(",")[0] for kind in TRAINED}
    assert counts.by_source.keys() > {"eagle", "recall"} if mixes else counts.by_source.keys() == names
    by_number = dict(enumerate([first, *route], 1))
    for (_, number), counts_of_version in counters.by_version.items():
        if not mixes and number in by_number:
            assert counts_of_version.by_source.keys() <= {by_number[number].partition(",")[0]}
    assert len(traces) == len(results)
    for trace in traces:
        taps = drafters[by_number[trace.drafter_version]].needs.taps
        assert (trace.hidden.shape[1] if trace.hidden is not None else 0) == len(taps) * HIDDEN


@pytest.mark.parametrize(("kind", "rate", "steps", "more"), [
    ("medusa", 0.01, 40, 0.2), ("prompt_tokens", 0.005, 60, 0.02), ("language_model, prompted", 0.003, 60, 0.05),
])  # fmt: skip
def test_drafter_trained_on_its_traces_gets_more_accepted(
    target_dir: Path, kind: str, rate: float, steps: int, more: float
) -> None:
    drafter, traces = trained(kind, target_dir), list[Trace]()
    if kind == "medusa":
        for parameter in drafter.trained().values():
            parameter.data.normal_(0, 0.3)  # new heads would already predict the repetitive text

    def accepted(client: Client) -> float:
        ask(client, f"{client.engine.drafter_version}", 40, [8] * 12)
        client.wait()
        return client.settled().by_version["general", client.engine.drafter_version].acceptance_rate

    with running(target_dir, drafter=drafter, traces=traces, slots=8, depth=3) as client:
        before = accepted(client)
        batches = [collate(group) for group in pack(traces, 512)]
        start = evaluate(drafter, batches, 3, "forward_kl")
        settings = TrainerSettings(learning_rate=rate, update_tokens=1, unroll=1)  # every head learns anyway
        distiller = Distiller(drafter, settings)
        for step in range(steps):
            assert not distiller.step(batches[step % len(batches)]).skipped
        end = evaluate(drafter, batches, 3, "forward_kl")
        client.engine.stage(2, drafter.weights())
        client.swapped_to(2)
        after = accepted(client)
    print(f"{start.per_depth} -> {end.per_depth}, {before:.3f} -> {after:.3f}")
    assert all(new > old for old, new in zip(start.per_depth, end.per_depth, strict=True))
    assert after > before + more


def noisy(drafter: Trainable) -> Drafter:
    """Return the drafter with noise in its weights and its acceptance head."""
    with torch.no_grad():
        for weight in drafter.add_head().parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
    return drafter


DRAFTERS: dict[str, Callable[[LlamaForCausalLM], Drafter]] = {
    "dspark": lambda model: noisy(DSpark.from_target(model, 3, 2, 4, 4)),
    "eagle": lambda model: noisy(Eagle.from_target(model, 4)),
    "early_exit": lambda model: noisy(EarlyExit(model, 4)),
    "falcon": lambda model: noisy(Falcon.from_target(model, 2, 4)),
    "kangaroo": lambda model: noisy(Kangaroo.from_target(model, 4, 1)),
    "language_model": lambda model: noisy(LanguageModel.first_layers(model, 1)),
    "language_model, prompted": lambda model: noisy(prompted_model(model, 2)),
    "medusa": lambda model: noisy(Medusa(model, 3, 4)),
    "prompt_tokens": lambda model: noisy(PromptTokens.from_target(model, 3, 1, 8)),
    "recall": lambda model: Recall(),
    "mixed": lambda model: Mixed(Eagle.from_target(model, 4)),
    "mixed, kangaroo": lambda model: Mixed(Kangaroo.from_target(model, 4, 1)),
    "token_select": lambda model: TokenSelect(SelectionSizes(initial=1, top=1, local=1, threshold=0.9), 3),
}

model = test_distribution.model


@pytest.mark.parametrize("kind", DRAFTERS)
def test_all_growth_policies_keep_the_output_distribution(model: LlamaForCausalLM, kind: str) -> None:
    torch.manual_seed(5)
    drafter, ways = (
        DRAFTERS[kind](copy.deepcopy(model)),
        [*policies(kind), *map(test_distribution.policy_named, ("block", "traversal"))],
    )
    assert test_distribution.p_value(model, SamplingParams(1.0), ways, count=1000, drafter=drafter) > 1e-4
