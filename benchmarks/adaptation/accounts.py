"""What training cost and what it saved, as a pass went on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.adaptation.turn import Turn


@dataclass(frozen=True)
class Account:
    """What training cost so far and what it saved, in seconds of a core, ``seconds`` after the first look."""

    seconds: float
    cost: float
    saved: float


def accounts(trained: Turn, untrained: Turn) -> list[Account]:
    """A pass with training beside one without, at each point of the first.

    Saved is what the engine took less for as many answered requests; what training takes from the rounds beside it is
    in there. The cost is what the trainer computed.
    """
    return [
        Account(point.seconds, point.training, trained.cores * (_busy(untrained, point.requests) - point.busy))
        for point in trained.curve
    ]


def _busy(turn: Turn, requests: float) -> float:
    """Seconds that the engine computed until so many requests were answered."""
    for one, two in itertools.pairwise(turn.curve):
        if requests <= two.requests:
            return one.busy + (two.busy - one.busy) * (requests - one.requests) / (two.requests - one.requests)
    return turn.end.busy


def payback(found: Sequence[Account]) -> float | None:
    """Seconds after which the savings stay above the costs until the end, None where they do not."""
    last_short = max((index for index, one in enumerate(found) if one.saved < one.cost), default=0)
    later = found[last_short + 1 :]
    return later[0].seconds if later else None
