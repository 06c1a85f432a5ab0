"""Gain of calling a trained drafter next to recall, by recall's certainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osd.economy.chances import Fading
from osd.economy.plan import StepBudget

STEP_TOKENS = 3
"""Tokens of a step, to guess the number of a sequence's further steps, which share the cost of reading. Mixed drafters
gave 2 to 5 on all streams of ``benchmarks/recall.md``."""

_CLASSES = 10
"""Classes of recall's chance of the first token; its chances are calibrated in tenths."""

_HOPE = 1.5
"""First guess of the tokens that the longest call adds where recall knows nothing: a good drafter adds as many, and a
new version is tried even where calls are expensive."""

_DOUBT = 8.0
"""Weight of this guess, in calls: the gain of a call varies by several times the guess."""

_LUCK = 5.0
"""Weight, in calls, of the mean of all classes and lengths in the mean of each: a gain varies by several tokens."""

_PATIENCE = 10.0
"""Weight, in steps, of the guess that every step calls the drafter: a trial follows within some thousand steps."""


@dataclass(frozen=True)
class Candidate:
    """Sequence that the trained drafter may draft for.

    Attributes:
        certainty: recall's chance of the first token.
        missed: tokens that the drafter has to read first.
        left: tokens that the sequence may still get.
        longest: tokens of the longest draft that the drafter can make.
        called: whether the drafter was called for it before, and has read the prompt.
    """

    certainty: float
    missed: int
    left: int
    longest: int
    called: bool


class CallGains:
    """Running means of the tokens that a call adds to a step, less the price of their rows.

    The gain of a call is known immediately: the value of the best draft with the call minus the value without it. While
    there are no calls of a class, its mean returns to the first guess, so that the drafter is tried again.
    """

    def __init__(self, levels: int) -> None:
        """Decide on calls for drafts of up to ``levels`` tokens."""
        self._levels, self._steps = levels, 0
        self.renew()

    def renew(self) -> None:
        """Reset all gains for another version of the drafter."""
        self._gains = [[Fading(_LUCK) for _ in range(self._levels)] for _ in range(_CLASSES)]
        self._brought, self._guessed = Fading(_DOUBT), Fading(_DOUBT)
        self._usual = [Fading() for _ in range(self._levels)]
        self._use = Fading(_PATIENCE)

    @property
    def added(self) -> list[float]:
        """Expected gain of drafts of 0, 1, 2, ... tokens in the next step, in tokens, if they took no call."""
        use = self._use.at(self._steps, 1.0)
        gains = (gain.at(self._steps, self._guess(0.0, level)) for level, gain in enumerate(self._usual, 1))
        return [0.0, *(use * gain for gain in gains)]

    def decide(self, candidates: Sequence[Candidate], budget: StepBudget, kind: str) -> tuple[list[int], int]:
        """Choose candidates to call the drafter for; return their indices and the number of tokens to draft for each.

        Args:
            candidates: sequences that the drafter may draft for.
            budget: rest of the step's budget after recall's draft.
            kind: of the drafter, by which the cost model knows the calls.
        """
        self._steps += 1
        use, costs = self._use.at(self._steps, 1.0), budget.costs
        prices = [
            budget.rho * costs.reading(kind, sequence.missed) / max(use * sequence.left / STEP_TOKENS, 1)
            for sequence in candidates
        ]
        best, members, chosen = 0.0, list[int](), 0
        for levels in range(1, self._levels + 1):
            gains = [
                self._gain(sequence.certainty, min(levels, sequence.longest)) - price
                for sequence, price in zip(candidates, prices, strict=True)
            ]
            value = 0.0
            paying = sorted((b for b, gain in enumerate(gains) if gain > 0), key=lambda b: -gains[b])
            for count, b in enumerate(paying, 1):
                value += gains[b]
                if (net := value - budget.rho * costs.proposal(kind, count, levels)) > best:
                    best, members, chosen = net, sorted(paying[:count]), levels
        for number, sequence in enumerate(candidates):
            if sequence.called:
                self._use.observe(number in members, self._steps)
        return members, chosen

    def observe(self, certainty: float, levels: int, gain: float) -> None:
        """Add the ``gain`` of a sequence from a call for a draft of ``levels`` tokens."""
        self._gains[_class(certainty)][levels - 1].observe(gain, self._steps)
        self._usual[levels - 1].observe(gain, self._steps)
        self._brought.observe(gain, self._steps)
        self._guessed.observe(self._guess(certainty, levels), self._steps)

    def _gain(self, certainty: float, levels: int) -> float:
        """Return the mean of the class and length; at first, the guess times the ratio of all gains to guesses."""
        brought, guessed = (mean.at(self._steps, _HOPE / 2) for mean in (self._brought, self._guessed))
        guess = max(brought, 0.0) / guessed * self._guess(certainty, levels)
        return self._gains[_class(certainty)][levels - 1].at(self._steps, guess)

    def _guess(self, certainty: float, levels: int) -> float:
        """Return the first guess: each further token of a draft adds half of the previous token."""
        return _HOPE * (1 - certainty) * (1 - 0.5**levels) / (1 - 0.5**self._levels)


def _class(certainty: float) -> int:
    return min(int(certainty * _CLASSES), _CLASSES - 1)
