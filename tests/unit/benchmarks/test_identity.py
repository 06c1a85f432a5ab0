from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import identity
from benchmarks.gpu.identity import Tally, compare, policies, slots
from benchmarks.streams import Answer
from osd.engine.request import TokenLogprobs
from osd.speculation.growth import GROWTHS
from osd.speculation.verification import VERIFICATIONS
from tests.unit.engine.harness import prompts, running

ASKED = [tuple(prompt) for prompt in prompts([5, 9, 3])]


def test_policies_cover_every_growth_and_rule_once() -> None:
    ways = [(growth, rule) for growth, rule, _ in policies()]
    assert len(set(ways)) == len(ways)
    assert {growth.split(",")[0] for growth, _ in ways} == set(GROWTHS)
    assert {rule for _, rule in ways} == set(VERIFICATIONS)


def test_answers_of_every_policy_are_those_of_plain_decoding(tiny_target: Path) -> None:
    done: list[int] = []
    with running(tiny_target, "eagle", slots=slots()) as client:
        tallies = compare(client.engine, ASKED, 8, done.append)
    assert done == [1, 2, 3]
    assert all(tally.identical == tally.total == 3 for tally in tallies)
    assert all(tally.drafted > 0 for tally in tallies)
    assert sum(tally.accepted for tally in tallies) > 0


def test_comparison_catches_an_engine_that_keeps_a_wrong_token(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
        return ([0], best[1]) if tokens else ([], best[0])

    spoilt = [(growth, rule, replace(policy, walk=careless)) for growth, rule, policy in policies()]
    monkeypatch.setattr(identity, "policies", lambda: spoilt)
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
