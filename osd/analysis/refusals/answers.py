"""Answers of the ways of decoding that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

PLAIN = "plain"
"""Way without speculation; every other way is compared with it."""

AGAIN = "plain again"
"""Second run without speculation, which shows how much sampled answers differ by chance."""


@dataclass(frozen=True)
class SamplingPlan:
    """One greedy answer and ``rounds`` sampled answers per prompt, each of at most ``tokens`` tokens."""

    tokens: int
    rounds: int
    temperature: float
    top_p: float


@dataclass(frozen=True)
class ModelAnswer:
    """Answer of the model.

    Attributes:
        tokens: tokens, as ids or as texts.
        text: text of all tokens.
        gaps: difference of the two largest log-probabilities at each position; empty if they were not requested.
        drafted: number of draft tokens.
        accepted: number of accepted draft tokens.
    """

    tokens: Sequence[int] | Sequence[str]
    text: str
    gaps: Sequence[float] = ()
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Answers:
    """Answers of a way of decoding: greedy answers by prompt, and sampled answers by round and prompt."""

    greedy: Sequence[ModelAnswer]
    sampled: Sequence[Sequence[ModelAnswer]]

    def all(self) -> Iterator[ModelAnswer]:
        """Return the greedy answers, then the sampled answers round by round."""
        return chain(self.greedy, *self.sampled)
