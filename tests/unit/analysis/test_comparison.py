from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from osd.analysis.refusals.answers import AGAIN, PLAIN, Answers, ModelAnswer
from osd.analysis.refusals.comparison import ALPHA, Difference, WayComparison, compare
from osd.analysis.refusals.labels import Label
from osd.analysis.refusals.prompts import PromptGroup, RefusalPrompt
from tests import harmless

PROMPTS = [RefusalPrompt.model_validate(prompt) for prompt in harmless.prompts(200)]


class LabelJudge:
    """Judge for answers that are their label; it counts the answers."""

    judged = 0

    def labels(self, answers: Sequence[tuple[RefusalPrompt, str]]) -> list[Label]:
        self.judged += len(answers)
        return [label for _, answer in answers for label in ("GOOD", "BAD", "UNCLEAR") if label == answer]


def answers_with(*labels: Sequence[Label]) -> Answers:
    """Return equal greedy answers, and sampled answers with ``labels`` for each round."""
    greedy = [ModelAnswer([1, 2], "BAD", [0.5, 0.5], 2, 1) for _ in PROMPTS]
    return Answers(greedy, [[ModelAnswer([], label) for label in row] for row in labels])


def sequence(good: int, bad: int) -> list[Label]:
    """Return 200 labels: first GOOD, then BAD, then UNCLEAR."""
    return ["GOOD"] * good + ["BAD"] * bad + ["UNCLEAR"] * (200 - good - bad)


def compare_with_plain(answers: Answers, plain: Answers, again: Answers) -> WayComparison:
    (*_, way) = compare(PROMPTS, {PLAIN: plain, AGAIN: again, "eagle": answers}, LabelJudge(), 1e-4)
    assert way.way == "eagle"
    json.dumps(way.figures(), allow_nan=False)
    return way


def test_equal_answers_have_no_findings_and_are_judged_once():
    judge, same = LabelJudge(), answers_with(sequence(80, 100), sequence(60, 120))
    ways = compare(PROMPTS, {PLAIN: same, AGAIN: same, "eagle": same}, judge, 1e-4)
    assert judge.judged == 200 + sum(
        first != second or first != "BAD" for first, second in zip(sequence(80, 100), sequence(60, 120), strict=True)
    )
    assert [list(way.broken) for way in ways] == [[], [], []]
    assert [way.pairs is None for way in ways] == [True, True, False]
    assert (ways[2].drafted, ways[2].accepted) == (400, 200)
    whole = ways[0].rates[0]
    assert (whole.group, whole.prompts) == (PromptGroup("all", ""), 200)
    assert {label: rate.share for label, rate in whole.labels.items()} == pytest.approx(
        {"GOOD": 0.35, "BAD": 0.55, "UNCLEAR": 0.1}
    )
    assert sum(rates.prompts for rates in ways[0].rates if rates.group.field == "level") == 200


def test_more_lost_than_gained_refusals_are_reported():
    plain = answers_with(sequence(100, 100))
    way = compare_with_plain(answers_with(sequence(85, 115)), plain, plain)
    assert (way.pairs.lost, way.pairs.gained, way.pairs.flips, way.pairs.kinds) == (15, 0, 15, {"GOOD to BAD": 15})
    assert way.pairs.p_refusals == pytest.approx(2 * 2**-15)
    (refusals, flips) = way.broken
    assert refusals == "eagle: 15 answers lost their refusal and 0 gained one, of 200 (p = 6.1e-05)"
    assert flips.startswith("eagle: 15 labels flip, and 0 flip between two plain answers, of 200 (p = ")


def test_more_flips_than_by_chance_are_reported():
    plain, again = sequence(100, 100), ["BAD"] * 10 + ["GOOD"] * 90 + ["GOOD"] * 10 + ["BAD"] * 90
    answers = ["GOOD"] * 60 + ["BAD"] * 40 + ["BAD"] * 60 + ["GOOD"] * 40
    way = compare_with_plain(answers_with(answers), answers_with(plain), answers_with(again))
    assert (way.pairs.lost, way.pairs.gained, way.pairs.p_refusals) == (40, 40, 1.0)
    assert (way.pairs.flips, way.pairs.by_chance) == (80, 20)
    assert way.pairs.p_flips < 1e-8
    (refusals,) = way.broken
    assert "80 labels flip, and 20 flip" in refusals


def test_as_many_flips_as_by_chance_are_not_reported():
    plain, again = sequence(100, 100), ["BAD"] * 10 + ["GOOD"] * 90 + ["GOOD"] * 10 + ["BAD"] * 90
    assert list(compare_with_plain(answers_with(again), answers_with(plain), answers_with(again)).broken) == []


def test_p_values_are_adjusted_for_all_ways():
    plain, worse = answers_with(sequence(100, 100)), answers_with(sequence(91, 109))
    alone = compare_with_plain(worse, plain, plain)
    assert alone.pairs.p_refusals < ALPHA
    equal_ways = {f"way {number}": plain for number in range(4)}
    ways = compare(PROMPTS, {PLAIN: plain, AGAIN: plain, "eagle": worse, **equal_ways}, LabelJudge(), 1e-4)
    assert ways[2].pairs.p_refusals == pytest.approx(9 * 2 * 2**-9)
    assert not any("refusal" in sentence for sentence in ways[2].broken)


def test_greedy_differences_are_reported_except_near_ties():
    plain = answers_with()
    plain.greedy[3:5] = [ModelAnswer([1, 2], "BAD", [0.5, 1e-5])] * 2
    answers = answers_with()
    answers.greedy[3] = ModelAnswer([1, 7], "GOOD", (), 2, 1)
    way = compare_with_plain(answers, plain, plain)
    assert way.differences == [Difference(3, 1, 1e-5)]
    assert [(flip.pid, flip.plain, flip.other) for flip in way.greedy_flips] == [(4, "BAD", "GOOD")]
    assert (way.ties, way.pairs, list(way.broken)) == (1, None, [])
    answers.greedy[4] = ModelAnswer([7, 2], "BAD", (), 2, 1)
    answers.greedy[9] = ModelAnswer([1, 2, 3], "BAD", (), 2, 1)
    way = compare_with_plain(answers, plain, plain)
    assert way.differences[1:] == [Difference(4, 0, 0.5), Difference(9, 2, None)]
    assert list(way.broken) == ["eagle: 2 of 200 greedy answers differ from plain decoding"]


def test_way_without_drafts_is_reported():
    plain = answers_with()
    idle = Answers([ModelAnswer(answer.tokens, answer.text, answer.gaps) for answer in plain.greedy], [])
    assert list(compare_with_plain(idle, plain, plain).broken) == [
        "eagle: nothing was drafted, so that the comparison shows nothing"
    ]
