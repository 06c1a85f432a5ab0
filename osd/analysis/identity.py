"""Whether greedy decoding says the same in two ways, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIES = {"float32": 1e-4, "bfloat16": 0.25}
"""Difference of two log-probabilities that rounding may turn around, by the precision of the target.

In bfloat16 logits from 16 to 32 are 0.125 apart, and either of two may be rounded to the next.
"""


@dataclass(frozen=True)
class Difference:
    """The first token that differs: of which prompt, its place in the answer, and how close the two best tokens are.

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


def differs_at(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first place at which two answers differ, None when they are the same."""
    places = range(max(len(one), len(other)))
    return next((place for place in places if one[place : place + 1] != other[place : place + 1]), None)
