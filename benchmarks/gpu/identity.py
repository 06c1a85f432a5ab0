"""Whether greedy decoding says the same with every way to speculate as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.streams import Answer, answers_of
from osd.analysis.identity import Difference, differs_at
from osd.config import GROWTH_SETTINGS
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.speculation.compatibility import IncompatibleError
from osd.speculation.growth import GROWTHS
from osd.speculation.verification import VERIFICATIONS

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
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    report: Callable[[int], None] = lambda done: None,
) -> list[Tally]:
    """Decode every prompt greedily, plainly and in every way, all ways in one engine.

    Args:
        engine: running, on a target in float32, not governed, with ``slots()`` slots.
        prompts: sent one after the other, each with all of the ways.
        tokens: of an answer at most.
        report: told how many prompts are done.
    """
    ways = list(policies())
    tallies = [Tally(growth, rule) for growth, rule, _ in ways]
    for index, prompt in enumerate(prompts):
        requests = [_request(_PLAIN, prompt, tokens, None)]
        requests += (_request(str(number), prompt, tokens, policy) for number, (_, _, policy) in enumerate(ways))
        found = answers_of(engine, requests)
        for number, tally in enumerate(tallies):
            tally.add(index, found[_PLAIN], found[str(number)])
        report(index + 1)
    return tallies


def _request(way: str, prompt: tuple[int, ...], tokens: int, policy: Policy | None) -> Request:
    greedy = SamplingParams(temperature=0)
    # The logits of plain decoding say how near a difference was.
    logprobs = 2 if policy is None else None
    # Drafters that remember do: what they draft are then answers that were given.
    return Request(
        way, prompt, tokens, greedy, speculate=policy is not None, policy=policy, logprobs=logprobs, capture=True
    )
