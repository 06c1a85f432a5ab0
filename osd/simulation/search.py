"""The number of trainers and the capture budget that leave most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Choice = tuple[int, int | None]
"""Trainers, and bytes a second that the whole service captures, None for everything."""


NONE: Choice = (0, None)
"""No training."""


@dataclass(frozen=True)
class Best:
    """The best choice, what it leaves, and everything that was tried with what it left, in that order."""

    choice: Choice
    net: float
    tried: dict[Choice, float]


def search(net: Callable[[int, int | None], float], trainers: Sequence[int], budgets: Sequence[int | None]) -> Best:
    """Look along one of both at a time, through all of its values, until neither gives more.

    It begins with the first of ``trainers``, and compares what it finds with no trainers, for whom no budget counts.
    What ``net`` says of a choice must not change, and is asked for once. Where it has one summit in each of both, as
    more trainers and more records bring less and less and cost what they cost, the best of all is found.
    """
    tried: dict[Choice, float] = {}

    def leaves(choice: Choice) -> float:
        if choice not in tried:
            tried[choice] = net(*choice)
        return tried[choice]

    best: Choice = (trainers[0], budgets[0])
    before = None
    while best != before:
        before = best
        best = max([best, *((best[0], budget) for budget in budgets)], key=leaves)
        best = max([best, *((count, best[1]) for count in trainers)], key=leaves)
    best = max([best, NONE], key=leaves)
    return Best(best, leaves(best), tried)
