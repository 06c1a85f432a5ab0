"""Greedy answers are the same with every way to speculate as without."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.streams import Answer, answers_of
from osd.analysis.refusals.comparison import Difference, differs_at
from osd.config import GROWTH_SETTINGS
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams, TokenLogprobs
from osd.speculation.compatibility import IncompatibleError
from osd.speculation.growth import GROWTHS
from osd.speculation.verification import VERIFICATIONS
from tests.unit.engine.harness import prompts, running

_PLAIN = "plain"
_SIZES = {"depth": 4, "budget": 8}  # of drafts, where a growth policy has them
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "dynamic_tree": ({}, {"threshold": 0.1}),
    "static_tree": ({}, {"draw": "iid"}, {"draw": "top_then_drawn"}),
}


@dataclass
class Tally:
    """How often one way to speculate gave the answer of plain decoding; ``ties`` are near ties among the others."""

    growth: str
    rule: str
    total: int = 0
    differences: list[Difference] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def identical(self) -> int:
        """Answers without a difference."""
        return self.total - len(self.differences)

    @property
    def ties(self) -> int:
        """Differences where the two best tokens are as likely as float32 can tell."""
        return sum(difference.near() for difference in self.differences)

    def add(self, prompt: int, plain: Answer, mine: Answer) -> None:
        """Count one answer."""
        self.total += 1
        self.drafted += mine.counts.drafted
        self.accepted += mine.counts.accepted
        place = differs_at(plain.tokens, mine.tokens)
        if place is not None:
            gap = plain.gaps[place] if place < len(plain.gaps) else None
            self.differences.append(Difference(prompt, place, gap))


def policies() -> Iterator[tuple[str, str, Policy]]:
    """Every growth policy, in every way to draw, with every rule that is lossless for it: two names and the policy."""
    for kind in GROWTHS:
        sizes = {name: size for name, size in _SIZES.items() if name in GROWTH_SETTINGS[kind].model_fields}
        for variant in _VARIANTS.get(kind, ({},)):
            growth = GROWTH_SETTINGS[kind](**sizes, **variant)
            name = ", ".join([kind, *(f"{key} {value}" for key, value in variant.items())])
            for rule in VERIFICATIONS:
                try:
                    yield name, rule, Policy.of(growth, rule)
                except IncompatibleError:
                    continue


def slots() -> int:
    """What an engine needs to answer a prompt in every way at once, and to read it once for all of them."""
    return 1 + sum(1 for _ in policies())


def compare(
    engine: Engine,
    asked: Sequence[tuple[int, ...]],
    tokens: int,
) -> list[Tally]:
    """Decode every prompt greedily, plainly and in every way, all ways in one engine."""
    ways = list(policies())
    tallies = [Tally(growth, rule) for growth, rule, _ in ways]
    for index, prompt in enumerate(asked):
        requests = [_request(_PLAIN, prompt, tokens, None)]
        requests += (_request(str(number), prompt, tokens, policy) for number, (_, _, policy) in enumerate(ways))
        found = answers_of(engine, requests)
        for number, tally in enumerate(tallies):
            tally.add(index, found[_PLAIN], found[str(number)])
    return tallies


def _request(way: str, prompt: tuple[int, ...], tokens: int, policy: Policy | None) -> Request:
    greedy = SamplingParams(temperature=0)
    # The logits of plain decoding say how near a difference was.
    logprobs = 2 if policy is None else None
    # Drafters that remember do: what they draft are then answers that were given.
    return Request(
        way, prompt, tokens, greedy, speculate=policy is not None, policy=policy, logprobs=logprobs, capture=True
    )


ASKED = [tuple(prompt) for prompt in prompts([5, 9, 3])]


def test_policies_cover_every_growth_and_rule_once() -> None:
    ways = [(growth, rule) for growth, rule, _ in policies()]
    assert len(set(ways)) == len(ways)
    assert {growth.split(",")[0] for growth, _ in ways} == set(GROWTHS)
    assert {rule for _, rule in ways} == set(VERIFICATIONS)


def test_answers_of_every_policy_are_those_of_plain_decoding(tiny_target: Path) -> None:
    with running(tiny_target, "eagle", slots=slots()) as client:
        tallies = compare(client.engine, ASKED, 8)
    assert all(tally.identical == tally.total == 3 for tally in tallies)
    assert all(tally.drafted > 0 for tally in tallies)
    assert sum(tally.accepted for tally in tallies) > 0


def test_comparison_catches_an_engine_that_keeps_a_wrong_token(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
        return ([0], best[1]) if tokens else ([], best[0])

    spoilt = [(growth, rule, replace(policy, walk=careless)) for growth, rule, policy in policies()]
    monkeypatch.setattr(sys.modules[__name__], "policies", lambda: spoilt)
    with running(tiny_target, "eagle", slots=slots()) as client:
        tallies = compare(client.engine, ASKED, 8)
    assert all(tally.identical < tally.total for tally in tallies)


def test_tally_separates_near_ties_from_other_differences() -> None:
    clear = TokenLogprobs(1, -0.1, ((1, -0.1), (7, -3.0)))
    near = TokenLogprobs(2, -0.7, ((2, -0.7), (4, -0.70001)))
    plain = Answer([1, 2], logprobs=[clear, near])
    tally = Tally("chain", "block")
    tally.add(0, plain, Answer([1, 2]))
    tally.add(1, plain, Answer([1, 4]))
    tally.add(2, plain, Answer([7, 2]))
    assert (tally.total, tally.identical, tally.ties) == (3, 1, 1)
