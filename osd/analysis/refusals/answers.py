"""The answers that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

PLAIN = "plain"
"""Without speculation: what every other way is compared with."""

AGAIN = "plain again"
"""The same once more, drawn anew: how much answers differ by chance."""


@dataclass(frozen=True)
class Plan:
    """Greedy answers once, and ``rounds`` of sampled ones, of ``tokens`` at most."""

    tokens: int
    rounds: int
    temperature: float
    top_p: float


@dataclass(frozen=True)
class Answer:
    """Its tokens, as ids or as texts, and the text of all of them.

    ``gaps`` are how far the two most probable tokens at each place are apart, in log-probability; empty where nobody
    asked. ``drafted`` and ``accepted`` count draft tokens.
    """

    tokens: Sequence[int] | Sequence[str]
    text: str
    gaps: Sequence[float] = ()
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Answers:
    """What one way said: to each prompt greedily, and sampled in each round."""

    greedy: Sequence[Answer]
    sampled: Sequence[Sequence[Answer]]

    def all(self) -> Iterator[Answer]:
        """In no matter which order."""
        return chain(self.greedy, *self.sampled)
