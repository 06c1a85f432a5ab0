"""A running domain goes through every kind of drafter: no request is lost, and no greedy text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osd.config import (
    TRAINED_SETTINGS,
    EagleSettings,
    EarlyExitSettings,
    FalconSettings,
    KangarooSettings,
    LanguageModelSettings,
    MedusaSettings,
    PromptTokensSettings,
)
from osd.drafters import Drafter, initial
from osd.drafters.mixed.drafter import Mixed
from tests.unit.engine.harness import Client, Oracle, prompts, running
from tests.unit.engine.test_medusa import swapped_to

TOKENS = 24
KINDS: dict[str, Any] = {
    "eagle": EagleSettings(vocabulary=200),
    "medusa": MedusaSettings(vocabulary=200),
    "language_model": LanguageModelSettings(layers=2),
    "falcon": FalconSettings(vocabulary=200),
    "language_model, prompted": LanguageModelSettings(layers=2, prompt_tokens=2),
    "kangaroo": KangarooSettings(vocabulary=200),
    "early_exit": EarlyExitSettings(vocabulary=200),
    "prompt_tokens": PromptTokensSettings(),
}


def test_every_kind_is_here() -> None:
    assert {kind.partition(",")[0] for kind in KINDS} == TRAINED_SETTINGS.keys()


def made(kind: str, directory: Path, mixes: bool) -> Drafter:
    torch.manual_seed(4)
    drafter = initial(KINDS[kind], directory, directory)
    return Mixed(drafter) if mixes else drafter


def begin(client: Client, name: str, asked: list[list[int]]) -> None:
    """Ask for greedy answers, and wait until all of them are under way."""
    for index, prompt in enumerate(asked):
        client.submit(f"{name} {index}", prompt, TOKENS, ignore_eos=True, capture=True)
    while not all(client.results[f"{name} {index}"].updates for index in range(len(asked))):
        client.next()


@pytest.mark.parametrize("mixes", [False, True], ids=["alone", "beside recall"])
def test_no_change_of_kind_loses_a_request_or_changes_its_text(target_dir: Path, oracle: Oracle, mixes: bool) -> None:
    """From each kind to the next, and from each back to the first."""
    asked, version = prompts((17, 3), seed=6), 1
    goals = [oracle.greedy(prompt, TOKENS) for prompt in asked]
    drafters = {kind: made(kind, target_dir, mixes) for kind in KINDS}
    first, *others = KINDS
    route = [*others, first, *(kind for other in others[1:] for kind in (other, first))]
    needs = drafters["prompt_tokens"].needs
    room = {"riders": needs.riders, "embeddings": needs.embeddings}
    with running(target_dir, drafter=drafters[first], slots=6, **room) as client:
        handle = client.engine.drafters("general")
        for kind in route:
            begin(client, f"before {version}, {kind}", asked)
            version += 1
            handle.stage(version, drafters[kind].weights(), drafters[kind])
            swapped_to(client.engine, version)
        begin(client, "in the end", asked)
        results = client.wait()
        counters = client.engine.counters()
    assert len(results) == len(asked) * (1 + len(route))
    for name, result in results.items():
        assert (result.finish, result.error) == ("length", None), name
        assert result.tokens == goals[int(name.split()[-1])], name
    assert (counters.failed, counters.cancelled, counters.swaps) == (0, 0, len(route))
    sources = counters.speculation().by_source.keys()
    assert sources > {"eagle", "recall"} if mixes else sources == TRAINED_SETTINGS.keys()
