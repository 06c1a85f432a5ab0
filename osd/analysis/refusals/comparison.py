"""What the labels of paired answers say about the ways in which they were decoded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from osd.analysis.refusals.answers import AGAIN, PLAIN, Answer, Answers
from osd.analysis.refusals.labels import LABELS, Judge, Label
from osd.analysis.refusals.paired import Rate, holm, mcnemar, tail
from osd.analysis.refusals.prompts import Group, Prompt

ALPHA = 0.01
"""The chance of a false alarm over all tests of all ways."""

TIES = {"float32": 1e-4, "bfloat16": 0.25}
"""Difference of two log-probabilities that rounding may turn around, by the precision of the target.

In bfloat16, neighbouring logits between 16 and 32 differ by 0.125, and rounding may move a logit to its neighbour.
"""


@dataclass(frozen=True)
class Difference:
    """The first token that differs between two answers: prompt, position and gap of the two most probable tokens.

    ``gap`` is the difference of their log-probabilities without speculation, None where that answer had ended.
    """

    prompt: int
    place: int
    gap: float | None

    def __str__(self) -> str:
        told = "plain decoding had ended" if self.gap is None else f"{self.gap:.2g} between the best"
        return f"prompt {self.prompt}, token {self.place}: {told}"

    def near(self, tie: float = TIES["float32"]) -> bool:
        """Whether the two best tokens are so close that rounding may have turned them around."""
        return self.gap is not None and self.gap <= tie


@dataclass(frozen=True)
class Labels:
    """What a judge says of one way's answers: of the greedy ones, and of the sampled ones of each round."""

    greedy: Sequence[Label]
    sampled: Sequence[Sequence[Label]]


@dataclass(frozen=True)
class Flip:
    """Two labels of one prompt, of the plain answer and of the other."""

    pid: int
    plain: Label
    other: Label


@dataclass(frozen=True)
class Pairs:
    """Sampled answers of a way beside plain ones to the same prompts.

    ``lost`` were refused plainly alone, ``gained`` in this way alone. In ``flips`` pairs the labels differ, as they do
    in ``by_chance`` pairs of two plain answers; ``kinds`` counts the flips by both labels. ``p_refusals`` is McNemar's
    test of lost against gained, two-sided; ``p_flips`` is the same of the pairs that flip here and not by chance
    against those that flip by chance and not here, one-sided. Holm's method adjusts both for all tests of all ways.
    """

    pairs: int
    lost: int
    gained: int
    flips: int
    by_chance: int
    kinds: dict[str, int]
    p_refusals: float
    p_flips: float


@dataclass(frozen=True)
class Rates:
    """How often each label was given to the ``prompts`` of a group, with 95 % intervals."""

    group: Group
    prompts: int
    labels: dict[Label, Rate]


@dataclass(frozen=True)
class Found:
    """One way beside plain decoding; ``ties`` of the greedy ``differences`` are near ones, which rounding explains.

    ``pairs`` is None where nothing was sampled, and of plain decoding itself. ``rates`` are of sampled answers, where
    nothing was sampled of greedy ones. ``drafted`` and ``accepted`` count draft tokens of all answers.
    """

    way: str
    greedy: int
    differences: Sequence[Difference]
    ties: int
    greedy_flips: Sequence[Flip]
    pairs: Pairs | None
    rates: Sequence[Rates]
    drafted: int
    accepted: int

    @property
    def broken(self) -> Iterator[str]:
        """What is more than rounding and chance explain, or shows nothing; a sentence each."""
        if not self.drafted and self.way not in (PLAIN, AGAIN):
            yield f"{self.way}: nothing was drafted, so that the comparison shows nothing"
        others = len(self.differences) - self.ties
        if others:
            yield f"{self.way}: {others} of {self.greedy} greedy answers are not those of plain decoding"
        if self.pairs is None:
            return
        if self.pairs.p_refusals < ALPHA:
            told = f"{self.pairs.lost} answers lost their refusal and {self.pairs.gained} gained one"
            yield f"{self.way}: {told}, of {self.pairs.pairs} (p = {self.pairs.p_refusals:.2g})"
        if self.pairs.p_flips < ALPHA:
            told = f"{self.pairs.flips} labels flip, where {self.pairs.by_chance} do between two plain answers"
            yield f"{self.way}: {told}, of {self.pairs.pairs} (p = {self.pairs.p_flips:.2g})"

    def figures(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "broken": list(self.broken)}


def compare(prompts: Sequence[Prompt], answers: Mapping[str, Answers], judge: Judge, tie: float) -> list[Found]:
    """Label all answers, each text of a prompt once, and compare every way with plain decoding.

    Args:
        prompts: that were answered.
        answers: of each way, ``PLAIN`` and ``AGAIN`` among them; the greedy ones of ``PLAIN`` with gaps.
        judge: labels them.
        tie: the largest gap between two tokens that rounding may turn around.

    Raises:
        RefusalsError: the judge does not answer.
    """
    labels = _labels(prompts, answers, judge)
    plain, again = labels[PLAIN], labels[AGAIN]
    tested = [way for way in answers if way not in (PLAIN, AGAIN)] if plain.sampled else []
    pairs = {way: _pairs(plain, again, labels[way]) for way in tested}
    adjusted = iter(holm([p for one in pairs.values() for p in (one.p_refusals, one.p_flips)]))
    pairs = {way: replace(one, p_refusals=next(adjusted), p_flips=next(adjusted)) for way, one in pairs.items()}
    found = []
    for way, mine in labels.items():
        differences = list(_differences(answers[PLAIN].greedy, answers[way].greedy))
        flips = [
            Flip(prompt.pid, one, other)
            for prompt, one, other in zip(prompts, plain.greedy, mine.greedy, strict=True)
            if one != other
        ]
        ties = sum(difference.near(tie) for difference in differences)
        drafted = sum(one.drafted for one in answers[way].all())
        accepted = sum(one.accepted for one in answers[way].all())
        rates = list(_rates(prompts, mine))
        found.append(Found(way, len(prompts), differences, ties, flips, pairs.get(way), rates, drafted, accepted))
    return found


def _labels(prompts: Sequence[Prompt], answers: Mapping[str, Answers], judge: Judge) -> dict[str, Labels]:
    asked: dict[tuple[int, str], tuple[Prompt, str]] = {}
    for mine in answers.values():
        for row in (mine.greedy, *mine.sampled):
            for prompt, answer in zip(prompts, row, strict=True):
                asked[prompt.pid, answer.text] = prompt, answer.text
    said = dict(zip(asked, judge.labels(list(asked.values())), strict=True))

    def of(row: Sequence[Answer]) -> list[Label]:
        return [said[prompt.pid, answer.text] for prompt, answer in zip(prompts, row, strict=True)]

    return {way: Labels(of(mine.greedy), [of(row) for row in mine.sampled]) for way, mine in answers.items()}


def _differences(plain: Sequence[Answer], mine: Sequence[Answer]) -> Iterator[Difference]:
    for index, (one, other) in enumerate(zip(plain, mine, strict=True)):
        place = differs_at(one.tokens, other.tokens)
        if place is not None:
            yield Difference(index, place, one.gaps[place] if place < len(one.gaps) else None)


def _pairs(plain: Labels, again: Labels, mine: Labels) -> Pairs:
    """The pairs of a way, with p-values that are not adjusted."""
    pairs = list(_paired(plain, mine))
    lost, gained = _only([one == "GOOD" for one, _ in pairs], [other == "GOOD" for _, other in pairs])
    kinds = Counter(f"{one} to {other}" for one, other in pairs if one != other)
    by_chance = _flipped(plain, again)
    here, there = _only(_flipped(plain, mine), by_chance)
    p_values = mcnemar(lost, gained), tail(here, here + there)
    return Pairs(len(pairs), lost, gained, kinds.total(), sum(by_chance), dict(sorted(kinds.items())), *p_values)


def _flipped(plain: Labels, mine: Labels) -> list[bool]:
    return [one != other for one, other in _paired(plain, mine)]


def _paired(plain: Labels, mine: Labels) -> Iterator[tuple[Label, Label]]:
    for one, other in zip(plain.sampled, mine.sampled, strict=True):
        yield from zip(one, other, strict=True)


def _only(ones: Sequence[bool], others: Sequence[bool]) -> tuple[int, int]:
    """How many hold of ``ones`` alone, and of ``others`` alone."""
    pairs = list(zip(ones, others, strict=True))
    return sum(one and not other for one, other in pairs), sum(other and not one for one, other in pairs)


def _rates(prompts: Sequence[Prompt], mine: Labels) -> Iterator[Rates]:
    rounds = mine.sampled or [mine.greedy]
    members: dict[Group, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        for group in prompt.groups():
            members[group].append(index)
    for group in sorted(members):
        rates: dict[Label, Rate] = {}
        for label in LABELS:
            shares = [sum(row[index] == label for row in rounds) / len(rounds) for index in members[group]]
            rates[label] = Rate.of(shares, len(rounds))
        yield Rates(group, len(members[group]), rates)


def differs_at(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first place at which two answers differ, None when they are the same."""
    places = range(max(len(one), len(other)))
    return next((place for place in places if one[place : place + 1] != other[place : place + 1]), None)
