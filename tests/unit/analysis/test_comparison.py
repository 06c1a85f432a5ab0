from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from osd.analysis.refusals.answers import AGAIN, PLAIN, Answer, Answers
from osd.analysis.refusals.comparison import ALPHA, Difference, Found, compare
from osd.analysis.refusals.labels import Label
from osd.analysis.refusals.prompts import Group, Prompt
from tests import harmless

PROMPTS = [Prompt.model_validate(one) for one in harmless.prompts(200)]


class Reads:
    """A judge for answers that say their label; it counts what it is asked."""

    asked = 0

    def labels(self, answers: Sequence[tuple[Prompt, str]]) -> list[Label]:
        self.asked += len(answers)
        return [label for _, answer in answers for label in ("GOOD", "BAD", "UNCLEAR") if label == answer]


def says(*labels: Sequence[Label]) -> Answers:
    """The same greedy answers always; in each round an answer of each of ``labels``."""
    greedy = [Answer([1, 2], "BAD", [0.5, 0.5], 2, 1) for _ in PROMPTS]
    return Answers(greedy, [[Answer([], label) for label in row] for row in labels])


def sequence(good: int, bad: int) -> list[Label]:
    """200 labels: the first are GOOD, then come those that are BAD."""
    return ["GOOD"] * good + ["BAD"] * bad + ["UNCLEAR"] * (200 - good - bad)


def found(mine: Answers, plain: Answers, again: Answers) -> Found:
    (*_, way) = compare(PROMPTS, {PLAIN: plain, AGAIN: again, "eagle": mine}, Reads(), 1e-4)
    assert way.way == "eagle"
    json.dumps(way.figures(), allow_nan=False)
    return way


def test_ways_that_say_the_same_are_alike_and_each_text_of_a_prompt_is_judged_once():
    judge, same = Reads(), says(sequence(80, 100), sequence(60, 120))
    ways = compare(PROMPTS, {PLAIN: same, AGAIN: same, "eagle": same}, judge, 1e-4)
    assert judge.asked == 200 + sum(
        one != two or one != "BAD" for one, two in zip(sequence(80, 100), sequence(60, 120), strict=True)
    )
    assert [list(one.broken) for one in ways] == [[], [], []]
    assert [one.pairs is None for one in ways] == [True, True, False]
    assert (ways[2].drafted, ways[2].accepted) == (400, 200)
    whole = ways[0].rates[0]
    assert (whole.group, whole.prompts) == (Group("all", ""), 200)
    assert {label: rate.share for label, rate in whole.labels.items()} == pytest.approx(
        {"GOOD": 0.35, "BAD": 0.55, "UNCLEAR": 0.1}
    )
    assert sum(one.prompts for one in ways[0].rates if one.group.field == "level") == 200


def test_more_refusals_lost_than_gained_are_no_chance():
    plain = says(sequence(100, 100))
    way = found(says(sequence(85, 115)), plain, plain)
    assert way.pairs is not None
    assert (way.pairs.lost, way.pairs.gained, way.pairs.flips, way.pairs.kinds) == (15, 0, 15, {"GOOD to BAD": 15})
    assert way.pairs.p_refusals == pytest.approx(2 * 2**-15)
    (told, flips) = way.broken
    assert told == "eagle: 15 answers lost their refusal and 0 gained one, of 200 (p = 6.1e-05)"
    assert flips.startswith("eagle: 15 labels flip, where 0 do between two plain answers, of 200 (p = ")


def test_more_flips_than_two_plain_answers_have_are_no_chance_though_the_rates_stay():
    plain, again = sequence(100, 100), ["BAD"] * 10 + ["GOOD"] * 90 + ["GOOD"] * 10 + ["BAD"] * 90
    mine = ["GOOD"] * 60 + ["BAD"] * 40 + ["BAD"] * 60 + ["GOOD"] * 40
    way = found(says(mine), says(plain), says(again))
    assert way.pairs is not None
    assert (way.pairs.lost, way.pairs.gained, way.pairs.p_refusals) == (40, 40, 1.0)
    assert (way.pairs.flips, way.pairs.by_chance) == (80, 20)
    assert way.pairs.p_flips < 1e-8
    (told,) = way.broken
    assert "80 labels flip, where 20 do" in told


def test_as_many_flips_as_two_plain_answers_have_are_chance():
    plain, again = sequence(100, 100), ["BAD"] * 10 + ["GOOD"] * 90 + ["GOOD"] * 10 + ["BAD"] * 90
    assert list(found(says(again), says(plain), says(again)).broken) == []


def test_the_p_values_are_those_of_the_worst_of_all_ways():
    plain, worse = says(sequence(100, 100)), says(sequence(91, 109))
    alone = found(worse, plain, plain)
    assert alone.pairs is not None
    assert alone.pairs.p_refusals < ALPHA
    others = {f"way {number}": plain for number in range(4)}
    ways = compare(PROMPTS, {PLAIN: plain, AGAIN: plain, "eagle": worse, **others}, Reads(), 1e-4)
    assert ways[2].pairs is not None
    assert ways[2].pairs.p_refusals == pytest.approx(9 * 2 * 2**-9)
    assert not any("refusal" in sentence for sentence in ways[2].broken)


def test_a_greedy_answer_that_differs_is_named_and_counts_unless_two_tokens_are_all_but_equal():
    plain = says()
    plain.greedy[3:5] = [Answer([1, 2], "BAD", [0.5, 1e-5])] * 2  # type: ignore[index]
    mine = says()
    mine.greedy[3] = Answer([1, 7], "GOOD", (), 2, 1)  # type: ignore[index]
    way = found(mine, plain, plain)
    assert way.differences == [Difference(3, 1, 1e-5)]
    assert [(flip.pid, flip.plain, flip.other) for flip in way.greedy_flips] == [(4, "BAD", "GOOD")]
    assert (way.ties, way.pairs, list(way.broken)) == (1, None, [])
    mine.greedy[4] = Answer([7, 2], "BAD", (), 2, 1)  # type: ignore[index]
    mine.greedy[9] = Answer([1, 2, 3], "BAD", (), 2, 1)  # type: ignore[index]
    way = found(mine, plain, plain)
    assert way.differences[1:] == [Difference(4, 0, 0.5), Difference(9, 2, None)]
    assert list(way.broken) == ["eagle: 2 of 200 greedy answers are not those of plain decoding"]


def test_a_way_that_drafted_nothing_shows_nothing():
    plain = says()
    idle = Answers([Answer(one.tokens, one.text, one.gaps) for one in plain.greedy], [])
    assert list(found(idle, plain, plain).broken) == [
        "eagle: nothing was drafted, so that the comparison shows nothing"
    ]
