"""Greedy answers with every policy, compared with plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osd.config import GROWTH_SETTINGS
from osd.drafting.compatibility import IncompatibleError
from osd.drafting.growth import GROWTHS
from osd.economy.turns import BLOCK
from osd.engine.policy import Policy
from osd.registry.pointer import Rollout
from osd.verification import VERIFICATIONS
from tests.unit.engine.harness import make_drafter, prompts, running, with_noise

_SIZES = {"depth": 4, "budget": 8}  # of drafts, for growth policies with these settings
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "dynamic_tree": ({}, {"threshold": 0.1}),
    "static_tree": ({}, {"draw": "iid"}, {"draw": "top_then_drawn"}),
}


def policies() -> Iterator[tuple[str, str, Policy]]:
    """Yield the names and the policy of each compatible growth, kind of draw and rule."""
    for kind in GROWTHS:
        sizes = {name: size for name, size in _SIZES.items() if name in GROWTH_SETTINGS[kind].model_fields}
        for variant in _VARIANTS.get(kind, ({},)):
            growth = GROWTH_SETTINGS[kind](**sizes, **variant)
            for rule in VERIFICATIONS:
                try:
                    yield kind, rule, Policy.of(growth, rule)
                except IncompatibleError:
                    continue


def identical(directory: Path, ways: Sequence[Policy], versions: int = 1) -> list[bool]:
    """Return whether the answers of each policy equal those of plain decoding; all policies share one engine.

    Two ``versions`` take turns within the answers.
    """
    texts, same = prompts([5, 9, 3]), [True] * len(ways)
    drafted, accepted = [0] * len(ways), 0
    length = 8 if versions == 1 else 2 * BLOCK
    with running(directory, "eagle", slots=1 + len(ways)) as client:
        if versions == 2:
            weights = with_noise(make_drafter("eagle", directory).weights(), 0.1)
            client.engine.drafters("general").try_canary(Rollout(1, 2, 0.5, 1.0), weights)
        for prompt in texts:
            client.submit("plain", prompt, length, speculate=False, capture=True)
            for number, policy in enumerate(ways):
                client.submit(str(number), prompt, length, policy=policy, capture=True)
            plain, *results = client.wait().values()
            for number, result in enumerate(results):
                same[number] &= result.tokens == plain.tokens
                drafted[number] += result.counts.drafted
                accepted += result.counts.accepted
        served = client.settled().by_version.keys()
    assert min(drafted) > 0
    assert accepted > 0
    assert served == {("general", version) for version in range(1, versions + 1)}
    return same


@pytest.mark.parametrize("versions", [1, 2])
def test_answers_of_every_policy_match_plain_decoding(tiny_target: Path, versions: int) -> None:
    growths, rules, ways = zip(*policies(), strict=True)
    assert set(growths) == set(GROWTHS)
    assert set(rules) == set(VERIFICATIONS)
    assert all(identical(tiny_target, ways, versions))


def test_comparison_detects_a_wrong_accepted_token(tiny_target: Path) -> None:
    def careless(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
        return ([0], best[1]) if tokens else ([], best[0])

    assert not any(identical(tiny_target, [replace(policy, walk=careless) for _, _, policy in policies()]))
